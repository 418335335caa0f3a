"""How many bytes each rank of a training run holds: the prediction from its flags, and the measurement."""

from extensions.planning import own_plan
from extensions.planning.footprint import (
    RankMemory,
    count_weights,
    measure_memory,
    memory_table,
    predict_memory,
)
from pipeline.collectives import gather
from pipeline.training import cut_layers


class OwnMemory:
    """The memory of a training run with exactly these flags; `schedule` is that of all replicas."""

    def __init__(self, arguments, schedule):
        self.arguments, self.schedule = arguments, schedule

    def predicted(self):
        """Return the predicted RankMemory of each rank."""
        a = self.arguments
        return predict_memory(
            a.config,
            self.schedule,
            cut_layers(a, self.schedule.num_stages),
            a.microbatch_size,
            a.torch_dtype.itemsize,
            a.optimizer,
            a.recompute,
            shards=a.replicas if a.sharding == "optimizer" else 1,
        )

    def print_plan(self):
        """Print what each rank would hold and how long an update would take. Returns status 0."""
        memory = self.predicted()
        weights = count_weights(self.arguments.config)[0]
        print(f"{self.arguments.model}: {weights:,} weights, {self.schedule.name}")
        print(memory_table({"predicted": memory}))
        most = max(range(len(memory)), key=lambda rank: memory[rank].total)
        print(
            f"the most on rank {most}: {memory[most].total / 2**30:.2f} GiB, and what torch needs"
        )
        own_plan.print_seconds(self.arguments, self.schedule)
        return 0

    def compare(self, job, stages, masters, training, activations):
        """Print what each rank held beside the prediction. All ranks call it.

        `activations` is this rank's peak in bytes; see `measure_memory` for the others.
        """
        own = measure_memory(stages, masters, training.optimizer, activations)
        rows = gather(job, vars(own))  # ranks exchange plain data, no objects: see unpickling.py
        if job.rank == 0:
            measured = [RankMemory(**row) for row in rows]
            print(memory_table({"measured": measured, "predicted": self.predicted()}))
