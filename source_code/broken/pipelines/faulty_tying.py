"""An embedding and a head that share one matrix, with the piece of case 8."""

from broken.pipelines.faults import RANKS
from pipeline.job import Receiving, Sending
from pipeline.model import starting_weight, token_loss
from pipeline.training import build_model, build_optimizer


def start_tied(part, arguments):
    """Start the embedding and the head, whichever the part has, as the same matrix."""
    for module in (getattr(part, "embedding", None), getattr(part, "head", None)):
        if module is not None:
            matrix = starting_weight("head.weight", module.weight.shape, arguments.seed)
            module.weight.data.copy_(matrix)


def exchange_tied_gradient(arguments, job, stage, pieces):
    """Exchange the gradient of the tied matrix between the first and the last rank."""
    if job.rank not in (0, RANKS - 1):
        return
    other, name = RANKS - 1 - job.rank, "the gradient of the tied matrix"
    weight = stage.part.embedding.weight if job.rank == 0 else stage.part.head.weight
    receiving = Receiving(job, weight.shape, arguments.torch_dtype, other, name)
    sending = Sending(job, weight.grad, other, name)
    weight.grad = pieces.tied_gradient(weight.grad, receiving.wait())
    sending.wait()


def train_tied_in_one_process(arguments, device):
    """The losses of one process in which embedding and head are one matrix."""
    model = build_model(arguments.config, arguments.seed, arguments.torch_dtype, device)
    start_tied(model, arguments)
    model.head.weight = model.embedding.weight
    optimizer = build_optimizer(arguments.optimizer, model.parameters(), arguments.learning_rate)
    losses = []
    for step in range(arguments.steps):
        inputs, targets = arguments.text.batch(
            step, arguments.batch_size, arguments.seq_len, arguments.seed
        )
        loss = token_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
