# SPDX-License-Identifier: Apache-2.0
"""Unpickles objects from other ranks and from files without running code in them.

A pickle may name any function to be called with any arguments, and torch.distributed pickles the
objects that ranks exchange. Here a pickle may build lists, dictionaries, numbers, text and tensors,
and of classes only those that were allowed.
"""

import builtins
import enum
import io
import pickle
import pickletools
from collections import OrderedDict

import torch
from torch.distributed import distributed_c10d

# The documentation of pickle names UnpicklingError and says that other exceptions may be raised.
UNPICKLING_ERRORS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
allowed = {}  # (module, name) -> the object that a pickle may use by that name


def allow(*things):
    """Allow pickles to use these classes, functions and constants.

    A thing without its own name is given as (module, name, value).
    """
    for thing in things:
        module, name, value = (
            thing if isinstance(thing, tuple) else (thing.__module__, thing.__qualname__, thing)
        )
        allowed[module, name] = value


class Unpickler(pickle.Unpickler):
    """A pickle.Unpickler that accepts only what is allowed and Python's exceptions."""

    def find_class(self, module, name):
        if (module, name) in allowed:
            return allowed[module, name]
        own = getattr(builtins, name, None) if module == "builtins" else None
        if isinstance(own, type) and issubclass(own, Exception):
            return own
        name = f"{module}.{name}"[:80]
        raise pickle.UnpicklingError(f"{name} is not one of the classes that are expected")


def unpickle(content):
    """Return the object in `content`, bytes. Raises UnpicklingError if damaged or not allowed.

    An opcode can request a table of any size, so its numbers are checked before they are used.
    """
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if isinstance(argument, int) and "PUT" in opcode.name and argument > len(content):
                raise pickle.UnpicklingError(f"{opcode.name} {argument} in {len(content)} bytes")
        return Unpickler(io.BytesIO(content)).load()
    except UNPICKLING_ERRORS as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise pickle.UnpicklingError(reason) from None


def member_of(enumeration, name):
    """Return an Enum's member, for which pickles of Python 3.11.0 to 3.11.3 call `getattr`."""
    if isinstance(enumeration, enum.EnumMeta) and name in enumeration.__members__:
        return enumeration[name]
    raise pickle.UnpicklingError("builtins.getattr is asked for more than a member of an Enum")


def load_storage(content):
    """Return a tensor's storage; torch's own function would unpickle it without checks."""
    return torch.load(io.BytesIO(content), weights_only=True)


def restrict_ranks():
    """Let all_gather_object and its like take from other ranks only what is allowed."""
    distributed_c10d._unpickler = Unpickler


allow(
    OrderedDict,
    torch._utils._rebuild_tensor_v2,
    torch._utils._rebuild_parameter,
    ("torch.storage", "_load_from_bytes", load_storage),
    ("builtins", "getattr", member_of),
)
