# SPDX-License-Identifier: Apache-2.0
"""Seconds of a stage's actions on a machine, fitted to measurements on that machine.

    seconds = a per action + b per layer + c per operation + d per byte

Each kind of action has its own four coefficients. The embedding, and the head with its loss, have
coefficients of their own. A rate alone is not enough: a small layer spends most of its time on
starting operations, a large one on computing them. The sums over replicas and the update have a
constant and a coefficient per byte or per weight.
"""

from dataclasses import dataclass

from files.inputs import InputError, is_number
from planning.transformer import logit_bytes, passing_bytes

KINDS = ("F", "B", "I", "W")  # forward, whole backward, its halves for input and weights
TERMS = (
    "action",
    "layer",
    "layer_operation",
    "layer_byte",
    "embedding",
    "embedding_byte",
    "head",
    "head_operation",
    "head_byte",
)
REST = ("update", "update_tensor", "update_weight", "sum", "sum_byte", "step", "message")
LARGEST = 1e6  # seconds


@dataclass(frozen=True)
class TimeCoefficients:
    """Coefficients in seconds. `actions` has for each of KINDS a tuple in the order of TERMS.

    `update`, `update_tensor` and `update_weight` are those of clipping and AdamW. `sum` and
    `sum_byte` are those of a sum over two replicas. `step` is the remaining time of every step, and
    `message` the time that each message takes from the computation of its sender and of its
    receiver.
    """

    actions: tuple
    update: float = 0.0
    update_tensor: float = 0.0
    update_weight: float = 0.0
    sum: float = 0.0
    sum_byte: float = 0.0
    step: float = 0.0
    message: float = 0.0

    def seconds(self, kind, quantities):
        """Seconds of one action of `kind`; `quantities` maps terms to amounts."""
        terms = dict(zip(TERMS, self.actions[KINDS.index(kind)]))
        return sum(terms[term] * amount for term, amount in quantities.items())


def layer_quantities(model, sequences, layers=1):
    """{term: amount} of `layers` layers, for one micro-batch of `sequences` sequences."""
    return {
        "layer": layers,
        "layer_operation": layers * model.layer_flops(sequences),
        "layer_byte": layers * passing_bytes(model, sequences, 1, False),
    }


def head_quantities(model, sequences):
    """{term: amount} of the last norm, the head and the loss."""
    return {
        "head": 1,
        "head_operation": model.head_flops(sequences),
        "head_byte": logit_bytes(model, sequences, 1),
    }


def embedding_quantities(model, sequences):
    """{term: amount} of the embedding: rows looked up, and a gradient as large as the table."""
    numbers = (sequences * model.length + model.vocabulary) * model.hidden
    return {"embedding": 1, "embedding_byte": 4 * numbers}


def coefficients_from(text, name):
    """The TimeCoefficients of the object "measured" in a machine's JSON. Raises InputError."""
    if not isinstance(text, dict):
        raise InputError(f"'measured' of {name} is not a JSON object")
    actions = text.get("actions")
    if not isinstance(actions, dict) or set(actions) != set(KINDS):
        raise InputError(f"'measured' of {name} has no 'actions' with {', '.join(KINDS)}")
    rows = []
    for kind in KINDS:
        row = actions[kind]
        if not isinstance(row, dict):
            raise InputError(f"'actions' of {name}: {kind} is not a JSON object")
        rows.append(tuple(_seconds(row, term, f"{kind} of {name}") for term in TERMS))
        if not any(rows[-1]):
            raise InputError(f"{kind} of {name} takes no time")
    return TimeCoefficients(tuple(rows), *(_seconds(text, term, name) for term in REST))


def _seconds(row, term, where):
    if not is_number(row.get(term), 0, LARGEST):
        raise InputError(f"{where} has no '{term}', seconds from 0")
    return float(row[term])


def as_text(measured):
    """TimeCoefficients as an object for JSON, in the form that `coefficients_from` reads."""
    rows = {kind: dict(zip(TERMS, row)) for kind, row in zip(KINDS, measured.actions)}
    return {"actions": rows, **{term: getattr(measured, term) for term in REST}}
