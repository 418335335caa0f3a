# SPDX-License-Identifier: Apache-2.0
"""How fast a training run is: tokens per second, and useful work as a share of the machine's peak.

Model FLOPs are those of the model itself, with one forward and one backward per token:
6 N + 12 L H Q T, for N weights in matrices, L layers of H heads of width Q and sequences of T
tokens (PaLM: Chowdhery et al. 2022, 2204.02311, appendix B). They exclude recomputation and
padding, so model FLOPs utilisation (MFU) is the useful work divided by the possible work.
"""

import re
import time

import torch
import torch.distributed as dist

from extensions.pretraining.weight_count import count_weights

# Dense bfloat16 FLOP/s from NVIDIA's data sheets, by whole words of torch's name for the GPU. The
# more specific name is first, because cards with the same chip differ in power and clock.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}


def flops_per_token(config):
    """Model FLOPs of forward and backward of one token.

    The embedding is looked up and multiplies nothing, so it is not in N. As in the source,
    attention is counted whole, although causal attention needs half of it.
    """
    weights = count_weights(config)[0] - config.vocabulary * config.dim
    return 6 * weights + 12 * config.layers * config.heads * config.head_dim * config.seq_len


def peak_flops(job, dtype):
    """Return the peak FLOP/s of the devices of all ranks together, and the number's source.

    The source is the table for bfloat16 on a listed GPU. Otherwise all ranks multiply matrices at
    the same time for a moment, so ranks on one device share its peak. All ranks call it.
    """
    known = known_peak(job.device, dtype)
    if known is None:
        with job.waiting_for_all("the start of a measurement"):
            dist.barrier()
        own = job.rank, measured_peak(job.device, dtype)
    else:  # by the GPU's own name, because under srun a rank may see only one GPU, number 0
        own = str(torch.cuda.get_device_properties(job.device).uuid), known
    everyone = [own] * job.num_ranks
    if job.num_ranks > 1:
        with job.waiting_for_all("its peak"):
            dist.all_gather_object(everyone, own)
    source = "its data sheet" if known else "matrix products measured here"
    return sum(dict(everyone).values()), source


def known_peak(device, dtype):
    """Return the data sheet's FLOP/s of a GPU, or None for a part of one (MIG) or an unknown one."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    if "MIG" in name.split():
        return None
    # "NVIDIA A100-SXM4-80GB": a hyphen ends a word, another letter or digit does not.
    words = (rf"(?<!\w){part}(?!\w)" for part in PEAKS)
    return next((PEAKS[part] for part, word in zip(PEAKS, words) if re.search(word, name)), None)


def measured_peak(device, dtype):
    """Measure the FLOP/s of products of large square matrices on this rank."""
    size = 4096 if device.type == "cuda" else 384
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    done, started = 0, None
    while started is None or time.perf_counter() - started < 0.1:  # seconds
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize()
        if started is None:  # the first product also loads the library
            started = time.perf_counter()
        else:
            done += 1
    return done * 2 * size**3 / (time.perf_counter() - started)
