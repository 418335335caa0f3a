# SPDX-License-Identifier: Apache-2.0
"""Inference: several texts continued by a pipeline at once, each token computed once.

    torchrun --standalone --nproc-per-node 4 inference.py --groups 4 --verify

Each rank keeps the keys and values of its own layers. Requests are in --groups, which are in flight
at the same time; a group has --slots places, which a finished request leaves to the next. A pass
has at most --tokens-per-pass tokens, so a long prompt is read in chunks. --checkpoints FOLDER takes
the newest model that pretrain_llama.py or distributed_checkpointing.py has saved there, and --model
DIR a Llama, Mistral, Qwen2 or Qwen3 that finetune.py or transformers has written. Without either
flag the weights are those with which a training run starts.
"""

import sys
import time
from argparse import Namespace
from collections import deque

import torch

from extensions.inference.cached_stage import CachedStage
from extensions.inference.passes import action_of, plan_passes, schedule_of
from extensions.inference.requests import choose_token, read_requests
from extensions.inference.saved_model import build_saved_part, take_sizes
from extensions.pretraining.token_files import is_token_folder, load_tokens
from extensions.pretraining.tokens import BYTES, load_corpus
from extensions.real_models.saved_folder import tokenizer_of
from extensions.real_models.saved_settings import SIZE_FLAGS
from guard.around_main import guarded
from guard.flags import check_alone
from lab import attach
from pipeline.command_line import number_from_zero, positive_integer, ranks_from_environment
from pipeline.data import load_text
from pipeline.job import join_job
from pipeline.message import Message
from pipeline.training import complete_model, cut_layers, model_parser

MOST_GROUPS = 1024  # enough for a pipeline of that many ranks
MOST_SLOTS = 4096
MOST_PASSES = 1_000_000  # planned in a few seconds


@guarded
def main():
    arguments = read_flags()
    requests = read_requests(arguments)
    cut = cut_layers(arguments, arguments.num_ranks)
    passes = plan_passes(requests, arguments.groups, arguments.slots, arguments.tokens_per_pass)
    schedule = schedule_of(passes, arguments.num_ranks)
    job = join_job(arguments.device, arguments.timeout, pairs_of(schedule.num_ranks))
    stage = build_cached_stage(arguments, job, cut)
    attach.observe(arguments, job, [stage], schedule, "whole run")

    start = time.perf_counter()
    texts = serve(arguments, job, stage, passes, requests, schedule)
    seconds = time.perf_counter() - start
    if job.rank == 0:
        show(arguments, requests, texts, seconds)
    job.leave()
    return verify(arguments, requests, texts) if arguments.verify and job.rank == 0 else 0


def pairs_of(num_ranks):
    """Return the pairs of ranks: activations to the next rank, chosen tokens from last to first."""
    pairs = [(rank, rank + 1) for rank in range(num_ranks - 1)]
    return pairs + [(num_ranks - 1, 0)] if num_ranks > 1 else []


def serve(arguments, job, stage, passes, requests, schedule):
    """Take all passes through this rank. Returns the tokens of every request on the first rank."""
    following = job.rank + 1
    texts = [list(request.prompt) for request in requests]
    chosen = deque()  # passes whose new tokens have not come back yet, and the tokens if here
    receives = PassReceives(arguments, job, passes, schedule)

    def take_chosen():
        before, tokens = chosen.popleft()
        if tokens is None:
            tokens = receives.take()
        for row, token in zip(before.choosing, tokens.tolist()):
            texts[row.request].append(token)

    for one in passes:
        receives.post_before(one)
        # The input: on the first rank tokens, of which the newest come from the last rank.
        if stage.is_first:
            while one.group in [before.group for before, _ in chosen]:
                take_chosen()
            tokens = [t for row in one.rows for t in texts[row.request][row.start : row.end]]
            inputs = torch.tensor(tokens, device=job.device)
        else:
            inputs = receives.take()
        output = stage.take_turn(one).forward(one.chain, inputs, one)

        # The output: on the last rank the next token of each text that has been read to its end.
        tokens = None
        if not stage.is_last:
            job.send(output, following, Message("activation", job.rank, one.chain))
        elif one.choosing:
            tokens = choose_tokens(arguments, one, output)
            if job.num_ranks > 1:
                job.send(tokens, 0, Message("tokens", job.rank, one.chain))
        if stage.is_first and one.choosing:
            chosen.append((one, tokens))
        # Keep few messages; an older one has been taken, or is waited for.
        if len(job.sent) > arguments.groups:
            job.sent.pop(0).wait()

    while chosen:
        take_chosen()
    job.complete_sends()
    return texts


class PassReceives:
    """The receives of this rank: activations, or on the first rank each pass's chosen tokens.

    Receives are posted in the one order of messages: receives.py says why.
    """

    def __init__(self, arguments, job, passes, schedule):
        self.arguments, self.job, self.schedule = arguments, job, schedule
        self.source = (job.rank - 1) % job.num_ranks
        sent = passes if job.rank else [one for one in passes if one.choosing]
        made = [(self.place_of(one, self.source), one) for one in sent if job.num_ranks > 1]
        self.expected, self.posted = deque(sorted(made)), deque()

    def place_of(self, one, rank):
        """Return the place of a message: the end of the pass on `rank` in the simulation."""
        return self.schedule.places[action_of(one, rank, self.job.num_ranks)]

    def post_before(self, one):
        """Post all receives whose messages are made before this rank has done a pass."""
        while self.expected and self.expected[0][0] < self.place_of(one, self.job.rank):
            self.post_next()

    def post_next(self):
        one = self.expected.popleft()[1]
        what, shape, dtype = "tokens", (len(one.choosing),), torch.int64
        if self.job.rank:
            what, dtype = "activation", self.arguments.torch_dtype
            shape = one.num_tokens, self.arguments.dim
        name = Message(what, self.source, one.chain)
        self.posted.append(self.job.receive(self.source, name, shape, dtype))

    def take(self):
        """Return the next tensor; wait for it if it has not arrived."""
        if not self.posted:
            self.post_next()
        return self.posted.popleft().wait()


def choose_tokens(arguments, one, scores):
    """Return the next token of each row that chooses one, (rows,), int64."""
    a = arguments
    tokens = [
        choose_token(row_scores, a.seed, row.request, row.end, a.temperature)
        for row, row_scores in zip(one.choosing, scores)
    ]
    return torch.tensor(tokens)


def build_cached_stage(arguments, job, cut):
    """Build this rank's layers with their weights, and the cache for all requests."""
    a, (first, last) = arguments, cut[job.rank]
    part = build_saved_part(a, first, last, job.device, job)
    return CachedStage(part, job.rank, job.num_ranks, a.groups, a.slots, a.seq_len)


def show(arguments, requests, texts, seconds):
    """Print every text, and how many tokens were chosen per second."""
    for number, (request, tokens) in enumerate(zip(requests, texts)):
        length = len(request.prompt)
        prompt, answer = map(arguments.text.decode, (tokens[:length], tokens[length:]))
        print(f"request {number}  {prompt!r} -> {answer!r}")
    count = sum(request.count for request in requests)
    print(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} per second", flush=True)


def verify(arguments, requests, texts):
    """Continue each request by itself in one process, without a cache. Returns the exit status."""
    a = arguments
    model = build_saved_part(a, 0, a.layers)
    for number, (request, ours) in enumerate(zip(requests, texts)):
        tokens = list(request.prompt)
        for _ in range(request.count):
            with torch.no_grad():
                scores = model(torch.tensor([tokens]))[0, -1]
            tokens.append(choose_token(scores, a.seed, number, len(tokens), a.temperature))
        if tokens != ours:
            theirs = a.text.decode(tokens[len(request.prompt) :])
            print(f"request {number}: one process writes {theirs!r}, THE PIPELINE SOMETHING ELSE")
            return 1
    print(f"all {len(requests)} texts are those of one process without a cache", flush=True)
    return 0


def read_flags():
    parser = model_parser(__doc__)
    add, count = parser.add_argument, {"type": positive_integer, "metavar": "N"}
    add("--requests", default=8, help="passages of the held-out text to be continued", **count)
    add("--prompt", action="append", metavar="TEXT", help="continue this instead; may be repeated")
    add("--tokens", default=16, help="tokens to write for each request", **count)
    add("--groups", help="groups of requests in flight, by default one per rank", **count)
    add(
        "--slots", default=2, help="requests of a group that are answered at the same time", **count
    )
    add("--tokens-per-pass", default=16, help="most tokens of a pass, prompts included", **count)
    add(
        "--temperature",
        type=number_from_zero,
        default=0.8,
        metavar="X",
        help="0: always the likeliest token",
    )
    add("--checkpoints", metavar="FOLDER", help="of a training run; its newest model is used")
    folder = "folder with a Llama, Mistral, Qwen2 or Qwen3, of finetune.py or transformers"
    add("--model", dest="model_folder", metavar="DIR", help=folder)
    add("--tokenizer", metavar="FILE", help="the tokenizer.json with which the model was trained")
    parser.reads += ["--checkpoints", "--model", "--tokenizer"]
    parser.set_defaults(seq_len=64, vocabulary=256)
    attach.add_flags(parser)
    arguments = parser.parse_args(None, Namespace(**dict.fromkeys(SIZE_FLAGS)))
    check_alone(parser, arguments, "prompt", ["requests"])
    arguments.groups = arguments.groups or ranks_from_environment()[1]
    if arguments.groups > MOST_GROUPS:
        raise SystemExit(
            f"--groups {arguments.groups}: at most {MOST_GROUPS} have a rank to keep busy; use fewer"
        )
    if arguments.slots > MOST_SLOTS:
        raise SystemExit(f"--slots {arguments.slots}: {MOST_SLOTS:,} are the most; use fewer")
    # The guard's memory check uses the number of requests at a time, and that of a group.
    arguments.batch_size = arguments.groups * arguments.slots
    arguments.microbatch_size = arguments.slots
    take_sizes(parser, arguments)
    complete_model(parser, arguments, read_corpus)
    if arguments.model_folder:
        arguments.config = arguments.saved.settings
    if arguments.tokens_per_pass < arguments.slots:
        raise SystemExit(
            f"--tokens-per-pass {arguments.tokens_per_pass} has no room for one token of each of "
            f"the --slots {arguments.slots}; use at least {arguments.slots}"
        )
    if arguments.temperature >= 1000:
        raise SystemExit(f"--temperature {arguments.temperature:g} must be below 1000; use 0.8")
    check_length(arguments)
    return arguments


def check_length(arguments):
    """Reject runs whose plan would take hours."""
    a = arguments
    requests = len(a.prompt) if a.prompt else a.requests
    # A group whose turn it is may have nothing to do.
    passes = max(requests, a.groups) * a.tokens
    if passes > MOST_PASSES:
        raise SystemExit(
            f"--requests, --groups and --tokens allow for {passes:,} passes, and {MOST_PASSES:,} "
            "are the most; lower one of them"
        )


def read_corpus(arguments):
    """Return the text, in the tokens with which the model was trained."""
    a = arguments
    tokenizer = a.tokenizer or tokenizer_of(a.model_folder)
    if is_token_folder(a.data):
        corpus = load_tokens(a.data, a.vocabulary, a.seq_len, tokenizer_of_model=tokenizer)
    elif tokenizer or a.vocabulary <= BYTES:
        corpus = load_corpus(load_text(a.data, a.seq_len), a.vocabulary, tokenizer, a.seq_len)
    else:
        saved = f"--model {a.model_folder}" if a.model_folder else f"--checkpoints {a.checkpoints}"
        raise SystemExit(f"{saved} has no tokenizer.json; name one with --tokenizer")
    flags = a.saved.description["configuration"] if a.checkpoints else {}
    if flags.get("--tokenizer") not in (None, corpus.vocabulary_digest):
        raise SystemExit(
            f"--checkpoints {a.checkpoints}: the model was trained with a tokenizer that has "
            f"{flags['--tokenizer']}; name that one with --tokenizer"
        )
    return corpus


if __name__ == "__main__":
    sys.exit(main())
