"""The model, however it is cut, and the text it learns."""

import hashlib
import itertools
import math
import zlib
from types import SimpleNamespace

import pytest
import torch

from pipeline import data, model
from pipeline.data import DataError, load_text
from pipeline.model import (
    Attention,
    ModelConfig,
    ModelPart,
    build_part,
    cut_as,
    cut_evenly,
    materialise,
    rotary_tables,
    rotate,
    starting_weight,
    token_loss,
)
from pipeline.training import cut_layers

torch.set_num_threads(1)

CONFIG = ModelConfig(layers=8, dim=16, heads=4, kv_heads=2, seq_len=12)
CUTS = [[8], [4, 4], [3, 3, 2], [1, 4, 2, 1], [2, 2, 2, 2], [7, 1], [1, 7], [1] * 8]


@pytest.fixture
def tokens():
    return load_text(seq_len=CONFIG.seq_len).batch(0, 3, CONFIG.seq_len)[0]


def whole_model(config, seed=0):
    return build_part(config, 0, config.layers, seed)


def parts_of(layers_per_stage, **options):
    return [build_part(CONFIG, *layers, **options) for layers in cut_as(layers_per_stage)]


# Every cut is the same model


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut_has_the_names_and_to_the_last_bit_the_starting_weights_of_the_whole(cut):
    whole = dict(whole_model(CONFIG, seed=3).named_parameters())
    in_parts = [pair for part in parts_of(cut, seed=3) for pair in part.named_parameters()]
    assert sorted(name for name, _ in in_parts) == sorted(whole)
    for name, weight in in_parts:
        assert torch.equal(weight, whole[name]), name


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_chained_parts_compute_to_the_last_bit_what_the_whole_model_does(cut, tokens):
    activation = tokens
    for part in parts_of(cut):
        activation = part(activation)
    assert activation.shape == (3, CONFIG.seq_len, ModelConfig.vocabulary)
    assert torch.equal(activation, whole_model(CONFIG)(tokens))


def test_only_the_first_part_has_the_embedding_and_only_the_last_the_norm_and_the_head():
    first, middle, last = [
        {name.split(".")[0] for name, _ in part.named_parameters()} for part in parts_of([3, 3, 2])
    ]
    assert first == {"embedding", "layers"}
    assert middle == {"layers"}
    assert last == {"layers", "norm", "head"}


def test_building_a_part_draws_the_weights_of_its_own_layers_and_no_others(monkeypatch):
    drawn = []

    def draw(name, shape, seed):
        drawn.append(name)
        return starting_weight(name, shape, seed)

    monkeypatch.setattr(model, "starting_weight", draw)
    part = build_part(CONFIG, 3, 5)
    assert drawn == [name for name, _ in part.named_parameters()]
    assert {name.split(".")[1] for name in drawn} == {"3", "4"}
    assert len(drawn) == 2 * 9  # two norms, four matrices of attention, three of SwiGLU


def test_one_layer_of_a_model_of_10_terabytes_is_built_in_the_memory_of_one_layer():
    huge = ModelConfig(layers=10**8, dim=64, heads=4, kv_heads=2, seq_len=8)
    part = build_part(huge, 70_000_000, 70_000_001)
    one_layer = sum(weight.numel() * weight.element_size() for weight in part.parameters())
    assert one_layer * huge.layers > 10**13
    assert one_layer < 10**6


def test_laying_a_part_out_takes_no_memory(monkeypatch):
    laid_out = []

    def note_and_materialise(part, *rest):
        laid_out.extend(tensor.device.type for tensor in (*part.parameters(), *part.buffers()))
        return materialise(part, *rest)

    monkeypatch.setattr(model, "materialise", note_and_materialise)
    built = build_part(CONFIG, 0, 8)
    assert set(laid_out) == {"meta"}
    assert {tensor.device.type for tensor in (*built.parameters(), *built.buffers())} == {"cpu"}


def test_starting_weights_depend_on_the_seed_and_on_nothing_else():
    def weights(seed):
        return list(build_part(CONFIG, 2, 4, seed).parameters())

    torch.manual_seed(1)
    first = weights(0)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, weights(0)))
    assert torch.equal(torch.get_rng_state(), before)
    # Norms start at one for every seed.
    differ = [not torch.equal(ours, theirs) for ours, theirs in zip(first, weights(1))]
    assert differ == [weight.dim() > 1 for weight in first]


def test_a_model_of_ones_own_starts_from_the_seed_and_the_names_as_well():
    def own():
        part = torch.nn.Sequential()
        part.add_module("3", torch.nn.Conv1d(4, 8, kernel_size=5))
        part.add_module("4", torch.nn.GRU(8, 8))
        part.add_module("norm", torch.nn.BatchNorm1d(8))
        return materialise(part, CONFIG, seed=3)

    first, second = own(), own()
    for (name, ours), theirs in zip(first.named_parameters(), second.parameters()):
        assert torch.equal(ours, theirs) and ours.dtype == torch.float64, name
        if "bias" in name:
            assert not ours.any(), name
    # A kernel of width 5 adds up 4 * 5 products.
    assert first[0].weight.std().item() == pytest.approx(20**-0.5, rel=0.2)
    assert first[2].weight.eq(1).all() and first[2].running_var.eq(1).all()


def test_no_two_matrices_of_a_model_of_1000_layers_start_from_the_same_draw():
    with torch.device("meta"):
        part = ModelPart(ModelConfig(layers=1000), 0, 1000)
    names = [name for name, _ in part.named_parameters()]
    assert len({zlib.crc32(name.encode()) for name in names}) == len(names)


def test_matrices_start_with_variance_one_over_inputs_and_norms_at_one():
    weights = dict(whole_model(ModelConfig(layers=1, dim=64)).named_parameters())
    assert weights.pop("embedding.weight").std().item() == pytest.approx(1, rel=0.05)
    for name, weight in weights.items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.05), name


def test_narrow_weights_are_the_rounded_wide_ones():
    wide, narrow = build_part(CONFIG, 0, 2), build_part(CONFIG, 0, 2, dtype=torch.float32)
    for ours, theirs in zip(narrow.parameters(), wide.parameters()):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.float())


# Cutting


def test_8_layers_on_3_ranks_are_cut_in_3_3_and_2():
    assert cut_evenly(8, 3) == cut_as([3, 3, 2]) == [(0, 3), (3, 6), (6, 8)]


def test_an_even_cut_differs_by_at_most_one_layer_and_gives_the_earlier_stages_more():
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            cut = cut_evenly(layers, stages)
            sizes = [last - first for first, last in cut]
            assert sum(sizes) == layers and len(sizes) == stages
            assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
            assert [first for first, _ in cut] == [0] + [last for _, last in cut[:-1]]


def test_fewer_layers_than_stages_cannot_be_cut():
    with pytest.raises(SystemExit, match="^--layers 3 is too few for 4 stages"):
        cut_layers(SimpleNamespace(layers=3, cut=None), 4)


# Attention


def test_no_position_sees_a_later_token(tokens):
    whole = whole_model(CONFIG)
    scores = whole(tokens)
    for position in range(CONFIG.seq_len):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % ModelConfig.vocabulary
        differs = (whole(changed) != scores).any(dim=-1)
        assert not differs[:, :position].any()
        assert differs[:, position:].all()


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1), (2, 1), (8, 2)])
def test_query_heads_share_the_key_and_value_heads_in_equal_groups(heads, kv_heads):
    """Against attention written out (Ainslie et al. 2023, section 2.2)."""
    config = ModelConfig(layers=1, dim=32, heads=heads, kv_heads=kv_heads, seq_len=6)
    attention = build_part(config, 0, 1).layers["0"].attention
    assert isinstance(attention, Attention)
    cosine, sine = rotary_tables(config)
    x = torch.randn(2, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    width = 32 // heads
    head_outputs = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        own = slice(head * width, (head + 1) * width)
        theirs = slice(shared * width, (shared + 1) * width)
        query = rotate(x @ attention.query.weight[own].T, cosine, sine)
        key = rotate(x @ attention.key.weight[theirs].T, cosine, sine)
        value = x @ attention.value.weight[theirs].T
        scores = query @ key.mT / math.sqrt(width)
        future = torch.ones(6, 6, dtype=torch.bool).triu(1)
        head_outputs.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
    expected = torch.cat(head_outputs, dim=-1) @ attention.output.weight.T

    torch.testing.assert_close(attention(x, (cosine, sine)), expected, rtol=0, atol=1e-13)


def test_fewer_key_and_value_heads_make_smaller_matrices_and_nothing_else():
    for kv_heads in (1, 2, 4):
        config = ModelConfig(dim=32, heads=4, kv_heads=kv_heads)
        shapes = {name: tuple(w.shape) for name, w in Attention(config).named_parameters()}
        assert shapes == {
            "query.weight": (32, 32),
            "key.weight": (8 * kv_heads, 32),
            "value.weight": (8 * kv_heads, 32),
            "output.weight": (32, 32),
        }


# Rotary position embedding (Su et al. 2021, section 3.2)


def random_vectors(count, width):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, dtype=torch.float64, generator=generator)


def test_rotation_keeps_the_length_of_a_vector():
    config = ModelConfig(dim=64, heads=4, seq_len=50)
    vectors = random_vectors(50, config.head_dim)
    rotated = rotate(vectors, *rotary_tables(config))
    torch.testing.assert_close(rotated.norm(dim=-1), vectors.norm(dim=-1), rtol=1e-14, atol=0)
    assert torch.equal(rotated[0], vectors[0])  # position 0 is not turned
    assert not torch.isclose(rotated[1:], vectors[1:]).all(dim=-1).any()


def test_the_score_of_a_query_and_a_key_depends_only_on_how_far_apart_they_are():
    config = ModelConfig(dim=64, heads=4, seq_len=50)
    query, key = random_vectors(2, config.head_dim)
    tables = rotary_tables(config)
    queries, keys = (rotate(vector.expand(50, -1), *tables) for vector in (query, key))
    scores = queries @ keys.T
    for distance in range(-49, 50):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-12)
    first_row = scores[0]
    assert first_row.unique().numel() == 50  # and on the distance it does depend


# Loss


def test_a_model_that_knows_nothing_loses_the_logarithm_of_256():
    scores = torch.zeros(2, 5, ModelConfig.vocabulary, dtype=torch.float64)
    targets = torch.arange(10).view(2, 5)
    assert token_loss(scores, targets).item() == pytest.approx(math.log(256), abs=1e-14)


def test_the_loss_of_a_batch_is_the_mean_of_the_losses_of_equal_microbatches(tokens):
    scores = whole_model(CONFIG)(tokens)
    parts = [token_loss(scores[i : i + 1], tokens[i : i + 1]) for i in range(3)]
    assert token_loss(scores, tokens).item() == pytest.approx(sum(parts).item() / 3, abs=1e-14)


# Batches


def test_a_batch_depends_only_on_seed_and_step():
    def batch(step, seed):
        return load_text(seq_len=16).batch(step, 4, 16, seed)

    forwards = {key: batch(*key) for key in itertools.product(range(5), range(3))}
    torch.manual_seed(123)
    before = torch.get_rng_state()
    for key in reversed(forwards):
        for ours, theirs in zip(batch(*key), forwards[key]):
            assert torch.equal(ours, theirs)
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in itertools.combinations(forwards.values(), 2):
        assert not torch.equal(one[0], other[0])


def test_1000_seeds_share_no_batch_within_a_million_steps(monkeypatch):
    # The generator of a batch is all that tells it from others, and has 32 bits.
    drawn_from = []
    real = torch.Generator.manual_seed

    class Generator(torch.Generator):
        def manual_seed(self, number):
            drawn_from.append(number)
            return real(self, number)

    text = load_text()
    monkeypatch.setattr(torch, "Generator", Generator)
    for seed in range(1000):
        text.batch(0, 1, 32, seed)
        text.batch(10**6, 1, 32, seed)
    first, last = sorted(drawn_from[::2]), drawn_from[1::2]
    gaps = [after - before for before, after in zip(first, first[1:])]
    assert all(0 <= number < 2**32 for number in drawn_from)
    assert min(gaps) > 10**6
    assert all((end - start) % 2**32 == 10**6 for start, end in zip(drawn_from[::2], last))


def test_targets_are_the_next_byte():
    text = load_text(seq_len=16)
    stream = bytes(text.training.tolist())
    inputs, targets = text.batch(7, 32, 16)
    assert inputs.shape == targets.shape == (32, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for row, target in zip(inputs, targets):
        assert bytes([*row.tolist(), target[-1].item()]) in stream


def test_the_last_tenth_is_held_out_and_never_trained_on(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(1, 101)))
    text = load_text(path, seq_len=8)
    assert text.training.tolist() == list(range(1, 91))
    assert text.held_out.tolist() == list(range(91, 101))
    seen = {
        token for step in range(200) for part in text.batch(step, 8, 8) for token in part.unique()
    }
    assert {int(token) for token in seen} == set(range(1, 91))  # and every other byte is


# The text


def test_the_default_text_is_24_to_32_kilobytes_of_ascii():
    content = data.DEFAULT_TEXT.read_bytes()
    assert 24_000 <= len(content) <= 32_000
    content.decode("ascii")
    assert hashlib.sha256(content).hexdigest() == data.DEFAULT_SHA256


def test_the_default_text_that_has_been_changed_is_refused(tmp_path, monkeypatch):
    content = bytearray(data.DEFAULT_TEXT.read_bytes())
    content[1000] ^= 1
    changed = tmp_path / "field_guide.txt"
    changed.write_bytes(content)
    monkeypatch.setattr(data, "DEFAULT_TEXT", changed)
    with pytest.raises(DataError) as refused:
        load_text()
    assert str(refused.value) == (
        "field_guide.txt has been changed, so no expected loss holds; restore it, "
        "or pass your own text with --data"
    )
    assert len(load_text(changed).training) == len(content) - len(content) // 10


def test_a_text_that_cannot_be_read_is_refused(tmp_path):
    missing = tmp_path / "missing.txt"
    with pytest.raises(DataError) as refused:
        load_text(missing)
    assert str(refused.value) == (
        f"--data: {missing} cannot be read (No such file or directory); name a text file"
    )


@pytest.mark.parametrize(
    "content, said",
    [
        (b"".join((n % 100).to_bytes(2, "little") for n in range(400)), "not text in UTF-8"),
        ("naïve".encode("latin-1") * 100, "not text in UTF-8"),
        ("Straße".encode() * 100 + "ß".encode()[:1], "not text in UTF-8"),
        (b"x" * (2**20 - 1) + "ß".encode() * 200 + b"\xff", "not text in UTF-8"),
        (b'{"text": "a"}\n' * 100, "make tokens of its texts .*, which reads JSON lines, "),
        (b'{"text": "a"}' + b" " * 400, "JSON lines"),
        (b'[\n  {\n    "text": "' + b"a" * 400 + b'"\n  }\n]\n', "JSON lines"),
    ],
    ids=[
        "tokens of 16 bits",
        "Latin-1",
        "a cut character",
        "behind a mebibyte",
        "lines",
        "a line",
        "an array",
    ],
)
def test_what_is_no_plain_text_is_refused_and_the_way_out_is_named(content, said, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        load_text(path, seq_len=8)


@pytest.mark.parametrize(
    "text",
    ["{ int main; } " * 40, "{x}\n" * 99, "[1] [a]\n" * 99, "ß" * 2**20 + "x", "\ufeffa" * 99],
)
def test_braces_and_letters_of_several_bytes_are_text(text, tmp_path):
    path = tmp_path / "data"
    path.write_text(text)
    assert load_text(path, seq_len=8).batch(0, 2, 8)[0].shape == (2, 8)


def test_the_mark_of_an_encoding_is_not_learnt(tmp_path):
    path = tmp_path / "of_windows.txt"
    path.write_text("ab" * 300, encoding="utf-8-sig")
    text = load_text(path, seq_len=8)
    assert text.training[:2].tolist() == list(b"ab") and len(text.training) == 540


def test_a_text_of_one_byte_less_than_10_sequences_is_refused_and_one_of_10_is_not(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 329)
    with pytest.raises(DataError) as refused:
        load_text(path, seq_len=32)
    assert str(refused.value) == (
        f"--data: {path} has 329 bytes, and --seq-len 32 needs at least 330; use a longer text or "
        "a smaller --seq-len"
    )
    path.write_bytes(b"x" * 330)
    text = load_text(path, seq_len=32)
    assert len(text.held_out) == 33  # one sequence and its last target
    assert text.batch(0, 2, 32)[0].shape == (2, 32)
