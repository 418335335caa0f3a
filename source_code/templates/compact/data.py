"""The text, the tokens, the batches."""

from pathlib import Path

import torch

from pipeline.arguments import refuse

DEFAULT_TEXT = Path(__file__).with_name("field_guide.txt")


class Text:
    """The bytes of a file as tokens; the last tenth is held out."""

    def __init__(self, path, seq_len):
        try:
            content = bytearray(Path(path).read_bytes())
        except OSError as error:
            refuse(f"--data {path} cannot be read ({error.strerror}); name a text file")
        if len(content) < 10 * (seq_len + 1):
            refuse(f"--data {path} is shorter than ten sequences; use a longer text")
        tokens = torch.frombuffer(content, dtype=torch.uint8).long()
        self.training = tokens[: len(tokens) - len(tokens) // 10]

    def batch(self, step, batch_size, seq_len, seed=0):
        """Inputs and targets of `step`, both (batch_size, seq_len); targets are one byte later."""
        generator = torch.Generator().manual_seed((seed * 2654435769 + step) % 2**32)
        starts = torch.randint(len(self.training) - seq_len, (batch_size,), generator=generator)
        rows = torch.stack([self.training[start : start + seq_len + 1] for start in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
