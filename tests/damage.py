"""Damages files in the ways that happen and in some that only an enemy thinks of, by a seed."""

import os
import random
import re
import shutil

# Inputs that are tried for each reader: 200 in `make test`; `make soak` sets the variable.
INPUTS = int(os.environ.get("FUZZ_INPUTS", "200"))
WHOLE = (b"", b"\n", b"{}", b"[]", b"null", b'"text"', b"0", b"[" * 100_000, b"\xff\xfe" * 50)
WORDS = (
    b"-1", b"0", b"1e999", b"-0.0", b"1e308", b"NaN", b"-Infinity", b"null", b"true", b"[]", b"{}",
    b'""', b'"\\ud800"', b"4294967296", b"99999999999999999999999", b"9" * 5000, b"0.5", b"\x00",
)  # fmt: skip


def damaged(content, rng):
    """`content`, bytes, with one to three things wrong."""
    if rng.random() < 0.03:
        return rng.choice(WHOLE)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = rng.choice(WAYS)(content, rng)
    return content


def flip_a_bit(content, rng):
    changed = bytearray(content)
    if changed:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut_off(content, rng):
    return content[: rng.randrange(len(content) + 1)]


def take_out(content, rng):
    start = rng.randrange(len(content) + 1)
    return content[:start] + content[start + rng.randrange(1, 40) :]


def double(content, rng):
    start = rng.randrange(len(content) + 1)
    end = start + rng.randrange(1, 200)
    return content[:end] + content[start:]


def insert_noise(content, rng):
    start = rng.randrange(len(content) + 1)
    return content[:start] + rng.randbytes(rng.randrange(1, 20)) + content[start:]


def change_a_number(content, rng):
    return change_a_match(rb"-?\d+(\.\d+)?(e[-+]?\d+)?", content, rng)


def change_a_value(content, rng):
    return change_a_match(rb'"[^"\n]*"|null|\{\}|\[\]', content, rng)


def change_a_match(pattern, content, rng):
    found = list(re.finditer(pattern, content[:200_000]))
    if not found:
        return content
    match = rng.choice(found)
    return content[: match.start()] + rng.choice(WORDS) + content[match.end() :]


def exchange_lines(content, rng):
    lines = content.split(b"\n")
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return b"\n".join(lines)


def leave_a_line_out(content, rng):
    lines = content.split(b"\n")
    del lines[rng.randrange(len(lines))]
    return b"\n".join(lines)


def double_a_line(content, rng):
    lines = content.split(b"\n")
    place = rng.randrange(len(lines))
    return b"\n".join([*lines[:place], lines[place], *lines[place:]])


WAYS = (
    flip_a_bit, flip_a_bit, cut_off, take_out, double, insert_noise, change_a_number,
    change_a_number, change_a_value, exchange_lines, leave_a_line_out, double_a_line,
)  # fmt: skip


def replace(path, content, rng):
    """Let `path` be a file with that content, or now and then something that is not a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    kind = rng.random()
    if kind < 0.01:
        os.mkfifo(path)
    elif kind < 0.02:
        path.mkdir()
    elif kind < 0.03:
        path.symlink_to(path.with_name("nowhere"))
    elif kind < 0.035:
        path.symlink_to("/dev/zero")
    elif kind > 0.99:
        pass  # missing
    else:
        path.write_bytes(content)


def generator(reader, number):
    """The random numbers of one input of one reader, the same in every run."""
    return random.Random(f"{reader} {number}")
