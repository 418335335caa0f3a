"""One process that trains the whole model: what every synchronous pipeline must equal."""

from pipeline.model import build_model, token_loss
from pipeline.optimizer import build_optimizer


def build_whole(arguments, device):
    """The course's model, with the flags' sizes, in one part."""
    return build_model(arguments.config, arguments.seed, arguments.torch_dtype, device)


def train_one_process(
    arguments,
    device="cpu",
    before_update=lambda model, optimizer, step: None,
    build_whole=build_whole,
    **options,
):
    """The loss of every step in nats, with the same flags and no pipeline: whole model and batch.

    `before_update(model, optimizer, step)` runs between backward and update: a learning-rate
    schedule sets its rate there, clipping changes the gradients. `build_whole(arguments, device)`
    may return another model, and `options` go to AdamW.
    """
    model = build_whole(arguments, device)
    optimizer = build_optimizer(
        arguments.optimizer, model.parameters(), arguments.learning_rate, **options
    )
    losses = []
    for step in range(arguments.steps):
        inputs, targets = arguments.text.batch(
            step, arguments.batch_size, arguments.seq_len, arguments.seed
        )
        loss = token_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        before_update(model, optimizer, step)
        optimizer.step()
        losses.append(loss.item())
    return losses
