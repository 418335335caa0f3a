# SPDX-License-Identifier: Apache-2.0
"""The traps of torch.distributed.pipelining, one file per section of the page of errors."""
