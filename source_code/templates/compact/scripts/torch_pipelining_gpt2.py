import os

import torch

from pipeline.arguments import parse_training_arguments, refuse, training_parser
from pipeline.distributed import join_job, leave_job, ranks_from_environment
from pipeline.model import VOCABULARY, token_loss
from pipeline.optimizer import build_optimizer
from pipeline.report import Report


def main():
    arguments = parse_arguments()
    job = join_job(arguments.device, arguments.timeout)
    stage = traced_stage(arguments, job)
    schedule = SCHEDULES[arguments.schedule](stage, arguments.microbatches, loss_fn=token_loss)
    optimizer = build_optimizer(
        arguments.optimizer, stage.submod.parameters(), arguments.learning_rate
    )
    tie = Tie(job, stage) if arguments.tied else None
    report = Report(arguments, job)

    for step in report.steps():
        inputs, targets = batch_of(arguments, job.device, step)
        optimizer.zero_grad()
        loss = run_step(schedule, stage, inputs, targets, {})
        if tie:
            tie.add_gradients()
        optimizer.step()
        report.record_step(step, loss)

    report.finish()
    leave_job(job)


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--schedule", choices=list(SCHEDULES), default="1F1B", help="the library's name of it")
    add("--tied", action="store_true", help="one matrix for embedding and head, as in GPT-2")
    # GPT-2 itself has 12 layers and width 768.
    parser.set_defaults(layers=12, dim=64, kv_heads=4, optimizer="adamw", learning_rate=0.001)
    arguments = parse_training_arguments(parser)
    if torch.cuda.device_count() < ranks_from_environment()[3]:
        arguments.device = "cpu"  # the library cannot send between ranks that share a GPU
    if arguments.schedule == "1F1B" and arguments.microbatches < arguments.num_ranks:
        refuse(f"--microbatches: 1F1B needs at least one for each of {arguments.num_ranks} stages")
    arguments.model_config = model_config(arguments)
    return arguments


def model_config(arguments):
    """The configuration from the flags: as small as the course's model, over bytes."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing is fetched
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=arguments.seq_len,
        n_embd=arguments.dim,
        n_layer=arguments.layers,
        n_head=arguments.heads,
        use_cache=False,  # a cache of keys and values is an output that no stage can send
        tie_word_embeddings=False,  # two stages cannot share a matrix; see Tie
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,  # with dropout no two cuts would draw alike
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def build_whole(arguments):
    """The whole model laid out without memory: shapes and names. Your own model goes here."""
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(arguments.model_config)
    return model.to(arguments.torch_dtype)


def weight_of(arguments, name, shape):
    """The starting value of one parameter, drawn from seed and name."""
    if arguments.tied and name == "lm_head.weight":
        name = "transformer.wte.weight"
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float64)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), arguments.seed))
    return INITIAL_SPREAD * torch.randn(shape, generator=generator, dtype=torch.float64)


def batch_of(arguments, device, step):
    """Inputs and targets of a step, for the whole batch, on every rank."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    return tuple(tokens.to(device) for tokens in batch)
