"""Reads a whole checkpoint in one process, through the course's reader."""

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from extensions.checkpointing.checkpoint_folder import PLAIN, CheckpointError
from extensions.checkpointing.checkpoint_reader import PlainReader, reason_of

# What checkpoint.json says of a training after one step, for folders that no training wrote.
COUNTED = {"rate": {"updates": 1}, "progress": {"step": 1, "batches": 1}}


def read_whole(checkpoint):
    """Return a whole Checkpoint as nested dictionaries. Raises CheckpointError."""
    state, reader, planner = {}, PlainReader(checkpoint), _EmptyStateDictLoadPlanner()
    reader.read_metadata()  # an older torch would not say why it is rejected
    try:
        _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(reason_of(error)) from None
    return state | {name: checkpoint.description[name] for name in PLAIN}
