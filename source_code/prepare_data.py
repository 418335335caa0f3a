# SPDX-License-Identifier: Apache-2.0
"""Makes tokens of texts once, so that no training has to.

    python prepare_data.py --data a.txt b.jsonl --vocabulary 4096 --out build/tokens
    torchrun ... pretrain_llama.py --data build/tokens --vocabulary 4096

--data takes text files, files of JSON lines (.jsonl) with one document per line under --field, and
folders of either. Documents are separated by an empty line. Each ends up whole in the training part
or in the held-out one. Texts are read and encoded a part at a time, so they may be larger than the
memory. --dataset NAME takes a Hugging Face data set instead, from the hub or from a local folder,
and streams no more of it than --characters. --check FOLDER compares an existing folder with its
checksums, and ends.
"""

import os
import re
import sys
from codecs import BOM_UTF8
from collections import Counter
from pathlib import Path
from shlex import quote

from extensions.pretraining.token_files import MOST_TOKENS, TOKEN_PARTS, TOKENIZER
from extensions.pretraining.token_writer import TokenWriter, check_folder, write_tokens_file
from extensions.pretraining.tokens import BYTES, encode, numbers_of, read_tokenizer
from files.claims import ClaimError, NewFolder
from files.inputs import MEBIBYTE, InputError, open_input, parse_json
from files.outputs import not_written
from guard.flags import check_alone, check_read
from guard.one_sentence import in_one_sentence
from guard.paths import check_new_folder
from pipeline.command_line import Parser, positive_integer
from pipeline.data import DataError, begins_json

PIECE = MEBIBYTE  # letters of text that are encoded at a time
LARGEST_DOCUMENT = 64 * MEBIBYTE
LONGEST_WORD = 1000  # letters; the time of a training grows with the square of a word's length
SEPARATOR = "\n\n"
JSON_LINES = ".jsonl"
FIELD = "text"


@in_one_sentence()
def main():
    arguments = read_flags()
    try:
        if arguments.check:
            return check(arguments.check)
        prepare(arguments)
    except (DataError, ClaimError) as error:
        raise SystemExit(str(error)) from None
    except InputError as error:
        if arguments.dataset:
            raise SystemExit(f"--dataset: {error}; name another one") from None
        raise SystemExit(f"--data: {error}; mend that, or leave it out of --data") from None
    except OSError as error:
        raise SystemExit(
            f"--out {arguments.out} cannot be written ({error.strerror}); nothing else was changed: "
            "make room or name another folder, and start again"
        ) from None
    return int(bool(not_written))


def prepare(arguments):
    """Write the folder, or leave nothing of it behind, and say what is in it."""
    arguments.paths, out = files_of(arguments.data or []), Path(arguments.out)
    lines = arguments.dataset or any(kind_of(path) == JSON_LINES for path in arguments.paths)
    if arguments.field != FIELD and not lines:
        raise SystemExit("--field has no effect without JSON lines (.jsonl); leave it out")
    check_new_folder("--out", out)
    claimed, writers = NewFolder("--out", out), {}
    try:
        said = encode_all(arguments, claimed, writers)
    except BaseException:  # an interrupt, too
        made = [name for writer in writers.values() for name in writer.made]
        claimed.give_up(made)
        raise
    claimed.release()
    print(said)


def encode_all(arguments, claimed, writers):
    """Encode every document of every file, with a writer for each part. Returns what to print."""
    out = claimed.folder
    tokenizer = choose_tokenizer(arguments)
    num_tokens = numbers_of(tokenizer)
    width = next(width for width, most in MOST_TOKENS.items() if num_tokens <= most)
    writers |= {part: TokenWriter(claimed, part, width) for part in TOKEN_PARTS}
    held_out_bytes = documents = 0
    for documents, document in enumerate(documents_in(arguments), 1):
        part = "held_out" if documents % arguments.hold_out == 0 else "training"
        text = document + SEPARATOR
        held_out_bytes += len(text.encode()) if part == "held_out" else 0
        for number, piece in enumerate(pieces_of(text)):
            begins = number == 0
            tokens = encode(tokenizer, piece, begins) if tokenizer else list(piece.encode())
            writers[part].write(tokens)
        writers[part].end_document()
    for writer in writers.values():
        writer.close()
    flag = "--dataset" if arguments.dataset else "--data"
    for part, writer in writers.items():
        if not writer.total:
            raise SystemExit(
                f"{flag} has {documents} documents, and none is left for the {part} part; use more "
                "documents (an empty line separates those of a text), or another --hold-out than "
                f"{arguments.hold_out}"
            )
    if tokenizer:
        writers["training"].write_beside(TOKENIZER, tokenizer.to_str(pretty=True))
    per_token = held_out_bytes / writers["held_out"].total
    write_tokens_file(out, writers, width, num_tokens, per_token, tokenizer is not None)
    counts = ", ".join(f"{writer.total:,} {part}" for part, writer in writers.items())
    return (
        f"{documents:,} documents: {counts} tokens of {width} bytes, numbers below {num_tokens}\n"
        f"train with --data {quote(str(out))} --vocabulary {num_tokens}"
    )


def files_of(names):
    """Return the files to read, those of a folder sorted by name."""
    paths = []
    for name in map(Path, names):
        found = [name]
        if os.path.isdir(name):
            try:
                there = sorted(one for one in name.iterdir() if not one.name.startswith("."))
                found = [one for one in there if kind_of(one) in (".txt", JSON_LINES)]
            except OSError as error:
                raise InputError(f"{name} cannot be read ({error.strerror})") from None
            if not found:
                raise DataError(
                    f"--data: {name} has no .txt and no .jsonl files; name a folder that has some"
                )
            others = [repr(one.name) for one in there if one not in found]
            if others:
                more = f" and {len(others) - 5} more" if len(others) > 5 else ""
                print(f"not read in {name}: {', '.join(others[:5])}{more}")
        paths += found
    named = Counter(map(os.path.realpath, paths))
    if twice := next((path for path in paths if named[os.path.realpath(path)] > 1), None):
        raise DataError(
            f"--data: {twice} is named more than once, also by its folder or a link; name it once, or "
            "the held-out part has documents of the training part"
        )
    return paths


def kind_of(path):
    return path.suffix.lower()


def choose_tokenizer(arguments):
    """Return the tokenizer of --tokenizer, or one trained on the text's first part; None: bytes."""
    if arguments.tokenizer:
        return read_tokenizer(arguments.tokenizer)
    if arguments.vocabulary == BYTES:
        return None
    sample, length = [], 0
    for document in documents_in(arguments):
        sample.append(document)
        length += len(document)
        if length > arguments.sample_characters:
            break
    return train_tokenizer(SEPARATOR.join(sample), arguments.vocabulary)


def train_tokenizer(text, vocabulary):
    """Train a byte-pair tokenizer with at most `vocabulary` tokens, including the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, BYTES + len(text)),  # the trainer reserves room for all at once
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(re.split(rf"(\S{{{LONGEST_WORD}}})", text), trainer)
    return tokenizer


def documents_in(arguments):
    """Yield every document that is not empty, as text."""
    if arguments.dataset:
        yield from documents_of_dataset(arguments.dataset, arguments.characters)
    for path in arguments.paths:
        if kind_of(path) == JSON_LINES:
            yield from documents_of_lines(path, arguments.field)
        else:
            yield from documents_of_text(path)


def documents_of_dataset(name, characters):
    """Yield the texts in the column `text` of a Hugging Face data set, `characters` in all.

    `name` names a data set of the hub or a local folder, also one that save_to_disk has written,
    followed by a colon and a configuration if it needs one. Only what is read is downloaded.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"--dataset {name} needs the package datasets; install it with `pip install datasets`, "
            "or name text files with --data"
        ) from None
    path, _, configuration = name.partition(":")
    library_error = getattr(getattr(datasets, "exceptions", None), "DatasetsError", OSError)
    try:
        for row in training_rows(datasets, path, configuration):
            document = row.get("text")
            if not isinstance(document, str):
                raise DataError(f"--dataset {name} has no column named text; use one that has")
            if document.strip():
                yield check_unicode(document[:characters], f"{name} has")
            characters -= len(document)
            if characters <= 0:
                return
    except (DataError, InputError):
        raise
    # Errors of the network, the hub, a file or a column.
    except (OSError, RuntimeError, ValueError, LookupError, library_error) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"--dataset {name} cannot be read ({reason}); check the name and the network, or name "
            "a local copy"
        ) from None


def training_rows(datasets, path, configuration):
    """Return the rows of a data set's part `train`; the library reads its two kinds of folders by
    two functions."""
    if os.path.isfile(os.path.join(path, "dataset_dict.json")):
        parts = datasets.load_from_disk(path)
        if "train" not in parts:
            raise DataError(
                f"--dataset {path} has the parts {', '.join(parts)} and no train; name the folder "
                "of one of them"
            )
        return parts["train"]
    if os.path.isfile(os.path.join(path, "state.json")):
        return datasets.load_from_disk(path)
    return datasets.load_dataset(path, configuration or None, split="train", streaming=True)


def documents_of_lines(path, field):
    """Yield the text under `field` of every line, each of which is one JSON object."""
    for number, line in enumerate(lines_of(path), 1):
        if not line.endswith(b"\n") and len(line) == LARGEST_DOCUMENT:
            raise InputError(f"{path}, line {number} has more than {LARGEST_DOCUMENT:,} bytes")
        if not line.strip():
            continue
        row = parse_json(as_text(line, path), f"{path}, line {number}")
        document = row.get(field) if isinstance(row, dict) else None
        if not isinstance(document, str):
            raise DataError(
                f"--data: {path}, line {number} has no text under --field {field}; name the key of the "
                "texts, such as --field body, or mend the line"
            )
        check_unicode(document, f"{path}, line {number} has")
        if document.strip():
            yield document


def check_unicode(document, where):
    """Return the document; half a pair of surrogates, which JSON may have, is rejected."""
    try:
        document.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} text that is not Unicode") from None
    return document


def documents_of_text(path):
    """Yield the parts between empty lines."""
    lines, length, is_start = [], 0, True
    for line in lines_of(path):
        if line.strip():
            lines.append(line)
            if is_start and len(lines) <= 3 and begins_json(b"".join(lines)):  # "[", "{", a name
                raise DataError(
                    f"--data: {path} has JSON; write a line per document, into a file that ends in .jsonl"
                )
            length += len(line)
            if length > LARGEST_DOCUMENT:
                raise InputError(f"{path} has a document of over {LARGEST_DOCUMENT:,} bytes")
        elif lines:
            yield as_text(b"".join(lines), path).rstrip("\n")
            lines, length, is_start = [], 0, False
    if lines:
        yield as_text(b"".join(lines), path).rstrip("\n")


def lines_of(path):
    """Yield the lines of a file; a line longer than LARGEST_DOCUMENT comes in parts."""
    with open_input(path) as file:
        began = os.fstat(file.fileno())
        yield file.readline(LARGEST_DOCUMENT).removeprefix(BOM_UTF8)  # files of Windows begin so
        yield from iter(lambda: file.readline(LARGEST_DOCUMENT), b"")
        ended = os.fstat(file.fileno())
    if (began.st_size, began.st_mtime_ns) != (ended.st_size, ended.st_mtime_ns):
        raise InputError(f"{path} has changed while it was read")


def as_text(content, path):
    if b"\0" in content:
        raise InputError(f"{path} is not text (it has the byte 0)")
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8 (byte {error.start} of a line)") from None


def pieces_of(text):
    """Yield `text` in pieces of at most PIECE letters, cut at line ends if possible."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def check(folder):
    """Compare a folder with its checksums. Returns the exit status."""
    try:
        check_folder(folder)
    except InputError as error:
        raise SystemExit(f"--check: {error}; make the folder anew") from None
    print(f"{folder} is whole")
    return 0


def read_flags():
    parser = Parser(__doc__)
    add, count = parser.add_argument, {"type": positive_integer, "metavar": "N"}
    add(
        "--data",
        action="extend",
        nargs="+",
        metavar="PATH",
        help="texts with empty lines between documents, JSON lines, or folders of them",
    )
    add("--dataset", metavar="NAME", help="a Hugging Face data set to stream, instead of --data")
    add("--characters", default=10_000_000, help="to read of --dataset", **count)
    add("--field", default=FIELD, help="key of the document in a line of JSON")
    add("--vocabulary", default=BYTES, help="tokens at most; 256: bytes, more: byte pairs", **count)
    add("--tokenizer", metavar="FILE", help="a tokenizer.json; default: trained on the text")
    add("--sample-characters", default=10_000_000, help="to train a tokenizer on", **count)
    add("--hold-out", default=10, help="every Nth document is held out", **count)
    add("--out", metavar="FOLDER", help="where the tokens go; a new folder")
    add("--check", metavar="FOLDER", help="compare a folder with its checksums, and end")
    arguments = parser.parse_args()
    check_alone(parser, arguments, "check")
    check_alone(parser, arguments, "tokenizer", ["vocabulary", "sample_characters"])
    if arguments.dataset and arguments.data:
        raise SystemExit("--dataset and --data both say what to read; use one of them")
    if not arguments.check and not ((arguments.data or arguments.dataset) and arguments.out):
        raise SystemExit("--data and --out are both needed: texts to read, and a folder to write")
    if arguments.vocabulary < BYTES:
        raise SystemExit(
            f"--vocabulary {arguments.vocabulary} has no room for all bytes; use at least 256"
        )
    if arguments.hold_out < 2:
        raise SystemExit("--hold-out 1 would hold out every document; use at least 2")
    if arguments.out and os.path.basename(arguments.out) == "":
        arguments.out = arguments.out.rstrip("/") or "/"
    check_read(parser, arguments, "--characters", arguments.dataset, "--dataset")
    check_read(
        parser,
        arguments,
        "--sample-characters",
        arguments.vocabulary > BYTES,
        "a --vocabulary above 256",
    )
    return arguments


if __name__ == "__main__":
    sys.exit(main())
