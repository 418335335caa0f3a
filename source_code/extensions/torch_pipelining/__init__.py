# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.pipelining beside the course's own worker, or in its place."""
