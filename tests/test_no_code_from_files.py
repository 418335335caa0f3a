"""Neither a file nor another rank brings code along, or asks for more memory than it is large."""

import dataclasses
import os
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_on_ranks
from torch.distributed.checkpoint.planner import WriteItemType
from whole_checkpoints import COUNTED, read_whole

from extensions.checkpointing import checkpoint_folder
from extensions.checkpointing.checkpoint_folder import CheckpointError, find_checkpoint
from files.unpickling import UNPICKLING_ERRORS, unpickle
from guard.around_main import guarded
from pipeline.job import join_job


class Evil:
    """Unpickled, it makes a file; any other command would do."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.fixture
def trace(tmp_path):
    """Where Evil leaves a trace: it must not be there in the end."""
    yield tmp_path / "trace"
    assert not (tmp_path / "trace").exists()


def save(folder, state):
    """A checkpoint of step 1 that torch has written of `state`, with checksums that fit."""
    temporary = checkpoint_folder.begin_writing(folder, "run-0001", 1)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(temporary), no_dist=True)
    return publish(temporary, folder)


def publish(temporary, folder):
    files = checkpoint_folder.describe_files(temporary, "")
    files.pop("checkpoint.json", None)
    description = {**COUNTED, "configuration": {}, "files": files}
    checkpoint_folder.publish(temporary, folder, "run-0001", 1, description, keep=2)
    return find_checkpoint(folder)


def forge(checkpoint, change):
    """The checkpoint with another description of its tensors, and checksums that fit."""
    file = checkpoint.path / ".metadata"
    file.write_bytes(change(file.read_bytes()))
    temporary = checkpoint.path.with_name(".writing-step-00000001-0000")
    checkpoint.path.rename(temporary)
    return publish(temporary, checkpoint.folder)


STATE = {"model": {"weight": torch.arange(6.0)}}


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    state = read_whole(save(tmp_path / "saved", STATE))
    assert torch.equal(state["model"]["weight"], torch.arange(6.0))
    assert state["rate"] == COUNTED["rate"]


def test_a_description_that_is_a_command_is_not_run(tmp_path, trace):
    checkpoint = forge(save(tmp_path / "saved", STATE), lambda _: pickle.dumps(Evil(trace)))
    with pytest.raises(CheckpointError, match="posix.mkdir is not one of the classes"):
        read_whole(checkpoint)


def test_a_value_that_is_a_command_is_not_run(tmp_path, trace):
    checkpoint = save(tmp_path / "saved", {**STATE, "rate": {"updates": Evil(trace)}})
    with pytest.raises(CheckpointError, match="rate.updates is not a tensor"):
        read_whole(checkpoint)


def exchange(rank, file):
    """What each rank learns from an exchange in which rank 1 sends a command."""
    job = join_job("cpu", 20.0)
    try:
        dist.all_gather_object([None] * 2, Evil(file) if rank else 3)
    except UNPICKLING_ERRORS as error:
        return str(error)
    finally:
        job.leave()


def exchange_guarded(rank, file):
    return guarded(partial(exchange, rank, file))()


@pytest.mark.processes
def test_a_command_from_another_rank_is_not_run(trace):
    said = run_on_ranks(exchange_guarded, 2, str(trace))
    assert all("posix.mkdir is not one of the classes that are expected" in text for text in said)


def exchange_own_class(rank):
    job, everyone = join_job("cpu", 20.0), [None] * 2
    dist.all_gather_object(everyone, Own(rank))
    job.leave()
    return [own.rank for own in everyone]


@dataclasses.dataclass
class Own:
    rank: int


@pytest.mark.processes
def test_in_a_copy_without_the_guard_ranks_exchange_what_torch_lets_them():
    assert run_on_ranks(exchange_own_class, 2) == [[0, 1], [0, 1]]


def test_tensors_numbers_and_exceptions_are_still_exchanged():
    value = {"a": [1, None, 2.5, "text"], "t": torch.eye(3), "e": OSError(28, "full")}
    again = unpickle(pickle.dumps(value))
    assert again["a"] == value["a"] and torch.equal(again["t"], value["t"])
    assert again["e"].errno == 28


class AsPython3112:
    """Pickled, it is what Python 3.11.0 to 3.11.3 write of a member of an Enum."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_a_member_of_an_enum_comes_back_as_early_python_3_11_wrote_it():
    for kind in (WriteItemType.TENSOR, WriteItemType.BYTE_IO):
        assert unpickle(pickle.dumps(AsPython3112(WriteItemType, kind.name))) is kind
    for owner, name in ((WriteItemType, "mro"), (torch.Size, "__init__"), ([], "append")):
        with pytest.raises(pickle.UnpicklingError, match="more than a member of an Enum"):
            unpickle(pickle.dumps(AsPython3112(owner, name)))


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_comes_back_as_each_python_writes_it(module):
    """Python 3.13 names the private module."""
    assert unpickle(f"c{module}\nPosixPath\n(S'of'\ntR.".encode()) == Path("of")


@pytest.mark.parametrize(
    "content",
    [
        b"cposix\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cbuiltins\nexit\n)R.",
        b"ctorch\nload\n.",
        b"cfiles.unpickling\nallowed\n.",
        b"]r\xff\xff\xff\xff.",  # a table of four billion entries
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",  # so many bytes of text
        b"",
        b"...",
    ],
)
def test_a_pickle_that_asks_for_more_than_is_allowed_is_rejected(content):
    with pytest.raises(pickle.UnpicklingError):
        unpickle(content)


def changed_metadata(**changes):
    """Changes the entry of the weight, or its place, in a pickled description."""

    def change(content):
        described = pickle.loads(content)
        for name, value in changes.items():
            if name in ("size", "chunks"):
                setattr(described.state_dict_metadata["model.weight"], name, value)
            elif name == "path":
                described.planner_data["model.weight"] = value
            else:
                for index, place in described.storage_data.items():
                    described.storage_data[index] = dataclasses.replace(place, **{name: value})
        return pickle.dumps(described)

    return change


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"size": torch.Size([2**40])}, "does not fit into"),
        ({"chunks": []}, "is not whole"),
        ({"size": torch.Size([3])}, "has a part outside of"),
        ({"size": torch.Size([6, 1])}, "has a part outside of"),
        ({"size": torch.Size([2**32, 2**32])}, "has no sizes"),  # of 2**64 numbers, torch says 0
        ({"size": torch.Size([2] * 1000)}, "has no sizes"),
        ({"relative_path": "../../../secret"}, "it describes no tensors"),
        ({"relative_path": "/etc/passwd"}, "it describes no tensors"),
        ({"offset": 2**40}, "lies outside of"),
        ({"length": -1}, "lies outside of"),
        ({"path": ("model", 2**40)}, "another place than its name says"),
    ],
)
def test_a_description_that_does_not_fit_the_files_is_rejected(tmp_path, changes, sentence):
    checkpoint = forge(save(tmp_path / "saved", STATE), changed_metadata(**changes))
    with pytest.raises(CheckpointError, match=sentence):
        read_whole(checkpoint)


def test_only_one_module_unpickles():
    sources = Path(checkpoint_folder.__file__).parents[2]
    for file in sources.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if file.name != "unpickling.py":
            assert "pickle.load" not in text and "Unpickler(" not in text, file
        if "torch.load(" in text:
            loads = text.count("torch.load(") - text.count("torch.load(file)")  # in a docstring
            assert text.count("weights_only=True") >= loads, file
