"""What a machine takes for the actions of a stage, fitted to measurements on that machine.

    seconds = a per action + b per layer + c per operation + d per byte

with one set of the four for each kind of action, and a set like it for what the first and the last
stage have besides: the embedding, and the head with its loss. A rate alone would not do: a small
layer takes most of its time to start its operations, a large one to carry them out. The sums over
replicas and the update have a constant and a term per byte or per weight.
"""

from dataclasses import dataclass

from extensions.planning.transformer import logit_bytes, passing_bytes
from pipeline.inputs import InputError, is_number

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
REST = ("update", "update_tensor", "update_weight", "sum", "sum_byte", "step")
LARGEST = 1e6  # seconds


@dataclass(frozen=True)
class Measured:
    """Seconds by term for each of KINDS, in the order of TERMS, and for what is no action.

    `update`, `update_tensor` and `update_weight` are those of clipping and AdamW; `sum` and
    `sum_byte` those of a sum over two replicas; `step` is what every step takes besides.
    """

    actions: tuple
    update: float
    update_tensor: float
    update_weight: float
    sum: float
    sum_byte: float
    step: float

    def seconds(self, kind, quantities):
        """Of one action with these quantities, a dictionary by term."""
        terms = dict(zip(TERMS, self.actions[KINDS.index(kind)]))
        return sum(terms[term] * amount for term, amount in quantities.items())


def layer_quantities(model, sequences, layers=1):
    """How much of each term so many layers of a stage are, for one micro-batch."""
    return {
        "layer": layers,
        "layer_operation": layers * model.layer_flops(sequences),
        "layer_byte": layers * passing_bytes(model, sequences, 1, False),
    }


def head_quantities(model, sequences):
    """The same for the last norm, the head and the loss."""
    return {
        "head": 1,
        "head_operation": model.head_flops(sequences),
        "head_byte": logit_bytes(model, sequences, 1),
    }


def embedding_quantities(model, sequences):
    """The same for the embedding: rows that are looked up, and a gradient as large as the table."""
    numbers = (sequences * model.length + model.vocabulary) * model.hidden
    return {"embedding": 1, "embedding_byte": 4 * numbers}


def measured_from(text, name):
    """The Measured of the object "measured" in a machine's JSON. Raises InputError."""
    if not isinstance(text, dict):
        raise InputError(f"'measured' of {name} is no JSON object")
    actions = text.get("actions")
    if not isinstance(actions, dict) or set(actions) != set(KINDS):
        raise InputError(f"'measured' of {name} has no 'actions' with {', '.join(KINDS)}")
    rows = []
    for kind in KINDS:
        row = actions[kind]
        if not isinstance(row, dict):
            raise InputError(f"'actions' of {name}: {kind} is no JSON object")
        rows.append(tuple(_seconds(row, term, f"{kind} of {name}") for term in TERMS))
    return Measured(tuple(rows), *(_seconds(text, term, name) for term in REST))


def _seconds(row, term, where):
    if not is_number(row.get(term), 0, LARGEST):
        raise InputError(f"{where} has no '{term}', seconds from 0")
    return float(row[term])


def as_text(measured):
    """The same as an object for JSON."""
    rows = {kind: dict(zip(TERMS, row)) for kind, row in zip(KINDS, measured.actions)}
    return {"actions": rows, **{term: getattr(measured, term) for term in REST}}
