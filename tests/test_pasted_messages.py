"""Whoever pastes a message into the website's search finds its entry on the page of errors first."""

import re
import subprocess
import sys

import pytest
from test_torch_pipelining_traps import BY_TRAP

from course.launch import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.further]  # the whole website, and a browser

PAGE = "docs/torch-distributed-pipelining-errors.html"
# What people paste, with their own numbers and paths, or type; and the traps of the right entries.
MESSAGES = (
    ('ValueError: Number of microbatches (4) must be greater than or equal to the number of stages (8). Consider using a larger batch size',
     'few-microbatches'),
    ('Number of microbatches (2) must be greater than                 or equal to the number of stages (4).',
     'few-microbatches'),
    ('ValueError: Interleaved 1F1B requires the number of microbatches to be a multiple of the number of rounds (3), but got 10.',
     'uneven-rounds'),
    ('Zero bubble requires the number of microbatches to be a multiple of the number of rounds (4), but got 6.',
     'uneven-rounds'),
    ('ValueError: ZBV requires exactly 2 stages per rank, but got 4.',
     'one-stage-in-a-v'),
    ('DualPipeV requires at least as many microbatches as stages, but got 4 microbatches and 8 stages.',
     'few-microbatches-in-dualpipev'),
    ('RuntimeError: Pipeline group size 8 cannot be larger than number of stages 4',
     'too-many-stages'),
    ('AssertionError: Rank 3, step 1: Running Full Backward for stage 3, microbatch 0 without first running Forward',
     'listed-order-of-1f1b'),
    ('RuntimeError: The Zero Bubble schedule is not supported with stage modules that have used torch.compile',
     'compiled-stage'),
    ('RuntimeError: This backward function was compiled with non-empty donated buffers which requires create_graph=False and retain_graph=False.',
     'compiled-in-place'),
    ('donated buffers retain_graph=False Failed to run stage backward input',
     'compiled-in-place'),
    ('assert received_acc is not None AssertionError in _warmup_forward_vote',
     'stages-in-blocks'),
    ('AssertionError _warmup_p2p assert received_acc is not None  # noqa: S101',
     'stages-in-blocks'),
    ("TypeError: 'PipelineStage' object is not subscriptable",
     'stage-in-place-of-a-list'),
    ("self.pp_group_size = stages[0].group_size TypeError: '_PipelineStage' object is not subscriptable",
     'stage-in-place-of-a-list'),
    ("AttributeError: 'list' object has no attribute 'num_stages'",
     'list-in-place-of-a-stage'),
    ("self._num_stages = stage.num_stages AttributeError: 'list' object has no attribute 'num_stages'",
     'list-in-place-of-a-stage'),
    ('pipeline hangs ZBVZeroBubble stages placed in a loop',
     'wrong-placement'),
    ('schedule.eval hangs if rank == last',
     'step-on-one-rank'),
    ('hang: one rank uses a different number of micro-batches, ranks cut the batch differently',
     'microbatches-differ'),
    ('RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.4]:40321',
     'dead-rank'),
    ('torch.distributed.elastic Root Cause (first observed failure): Connection closed by peer',
     'dead-rank'),
    ('RuntimeError: Mismatch in shape: grad_output[0] has a shape of torch.Size([4, 128, 512]) and output[0] has a shape of torch.Size([2, 128, 512]).',
     'uneven-batch'),
    ('ValueError: Expected input batch_size (384) to match target batch_size (320).',
     'tokens-of-an-uneven-batch'),
    ('return torch._C._nn.cross_entropy_loss ValueError: Expected input batch_size (16384) to match target batch_size (8192).',
     'tokens-of-an-uneven-batch'),
    ("terminate called after throwing an instance of 'gloo::EnforceNotMet' what(): [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8192 vs 4096",
     'traced-in-another-type longer-rows'),
    ('op.preamble.length <= op.nbytes in a later step, longer rows',
     'longer-rows'),
    ('RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16',
     'stages-of-two-types'),
    ('F.linear(input, self.weight, self.bias) RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float',
     'stages-of-two-types'),
    ('ValueError: input tensor has to be contiguous',
     'gradients-that-are-views'),
    ('_batch_p2p dist.batch_isend_irecv RuntimeError: input tensor has to be contiguous',
     'gradients-that-are-views'),
    ('PipeliningShapeError Stage arg[1] is None. Stage args must be tensors. Use kwargs for optional values.',
     'tuple-with-none'),
    ('ValueError: Stage arg[0] is None. Stage args must be tensors. Use kwargs for optional values.',
     'tuple-with-none'),
    ('ValueError: Expecting 8 arg_mbs but got 1',
     'mask-without-a-batch more-microbatches-than-rows batch-in-the-second-dimension'),
    ('ValueError: Expecting 32 arg_mbs but got 16',
     'mask-without-a-batch more-microbatches-than-rows batch-in-the-second-dimension'),
    ('position_ids of shape (3, batch, length): Expecting 8 arg_mbs but got 3',
     'batch-in-the-second-dimension'),
    ('more micro-batches than rows arg_mbs',
     'more-microbatches-than-rows'),
    ('attention mask has no effect on later stages',
     'mask-on-one-rank'),
    ('RuntimeError: grad can be implicitly created only for scalar outputs',
     'loss-per-row examples-without-gradient'),
    ('grad can be implicitly created only for scalar outputs, on another rank, examples',
     'examples-without-gradient'),
    ('nothing happens, input example without a gradient',
     'input-example-without-gradient'),
    ('frozen stages zero bubble first trainable stage gets no gradient',
     'frozen-first-stage'),
    ('ignored targets -100 mean loss differs padding',
     'ignored-targets'),
    ('loss is nan: a micro-batch without targets',
     'no-target-in-a-microbatch'),
    ('RuntimeError: step() requires gradients to be enabled for backward computation; it should not be used under torch.no_grad() context. Please call eval() instead.',
     'step-without-grad'),
    ('schedule.eval() memory keeps every graph',
     'eval-keeps-graphs'),
    ('eval() needs more memory than training',
     'eval-keeps-graphs'),
    ('RuntimeError: Stage 1: loss_fn and target required for last stage',
     'step-without-targets'),
    ('Stage 7: loss_fn and target required for last stage',
     'step-without-targets'),
    ("TypeError: Stage.forward() got an unexpected keyword argument 'targets'",
     'targets-under-another-name'),
    ("TypeError: GPTModel.forward() got an unexpected keyword argument 'targets'",
     'targets-under-another-name'),
    ('RuntimeError: Expecting 8 losses but got 0',
     'losses-without-a-loss-function'),
    ('raise RuntimeError Expecting 16 losses but got 0 _update_losses',
     'losses-without-a-loss-function'),
    ('loss is -1 on ranks without the last stage',
     'loss-off-the-last-rank'),
    ('auxiliary loss on an earlier stage second loss',
     'loss-of-a-middle-stage'),
    ('hooks pile up register_hook',
     'hooks-pile-up'),
    ("target_mbs[mb_index] TypeError: 'NoneType' object is not subscriptable in eval",
     'eval-without-targets'),
    ("'NoneType' object is not subscriptable ZBVZeroBubble with a V",
     'loss-on-the-wrong-rank'),
    ("AssertionError: can't steal_bwd_input if this stage doesn't have backward",
     'eval-of-a-v'),
    ('gradients are too large zero_grad',
     'gradients-kept'),
    ('gradient accumulation over steps scale_grads',
     'accumulation'),
    ('RuntimeError: When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an `inputs` parameter to .backward().',
     'checkpointed-in-halves'),
    ('activation checkpointing is paid twice zero bubble',
     'checkpointed-in-halves'),
    ('one forward more than there are micro-batches BatchNorm statistics',
     'one-forward-more'),
    ('a loss that is a sum divided by the number of tokens scale_grads',
     'sum-loss'),
    ('clip_grad_norm_ norm differs per rank gradient clipping',
     'clipping'),
    ('out of memory on the last rank outputs kept return_outputs',
     'all-scores-kept'),
    ('RuntimeError: It seems that we cannot capture your model as a full graph. Typical reasons include graph breaks, data/shape-dependent control flow',
     'branch-on-data'),
    ("Found <class 'transformers.cache_utils.DynamicCache'> in output, which is not a known type.",
     'cache-in-the-output'),
    ('NotImplementedError Backward of skip connections not supported yet',
     'skip-connection'),
    ('RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:789] state_ >= CONNECTED. 1 vs 4. Pair is not connected ([127.0.0.1]:61323)',
     'traced-in-a-v'),
    ('AssertionError: [Stage 1] expected non-root _RecvInfo but got root arg',
     'traced-input-used-later'),
    ('[Stage 3] expected non-root _RecvInfo but got root arg _RootArgPlaceholder',
     'traced-input-used-later'),
    ('traced pipeline inputs swapped order of placeholders',
     'traced-inputs-swapped'),
    ('RuntimeError: Tensor device mismatch! Expected: meta, Got: cuda:0',
     'device-in-the-graph'),
    ('tied embeddings pipeline stages wrong gradient lm_head',
     'tied-embeddings'),
    ('buffers after to_empty() rotary inv_freq nan',
     'stale-buffers'),
    ('RuntimeError: Tensor on device meta is not on the expected device cuda:0!',
     'buffers-left-on-meta'),
    ('NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() instead of torch.nn.Module.to()',
     'moved-from-meta'),
    ('all stages start alike same seed equal weights',
     'one-seed-a-stage'),
    ('RuntimeError: Error(s) in loading state_dict for Transformer: Missing key(s) in state_dict: layers.4.weight',
     'part-of-a-checkpoint'),
    ('IndexError: index out of range in self',
     'token-out-of-range'),
    ('RuntimeError: params_.size() == rebuilt_param_indices_.size() INTERNAL ASSERT FAILED at ../torch/csrc/distributed/c10d/reducer.cpp:1987',
     'ddp-without-shapes'),
    ('DDP and zero bubble replicas diverge ZBVZeroBubble DistributedDataParallel',
     'ddp-with-split-backward'),
    ('evaluation between two steps FSDP gradients are lost',
     'eval-between-passes'),
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pasted") / "site"
    command = [sys.executable, ROOT / "tools" / "make_site.py", "--static", "--into", folder]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return folder


def anchors_of(site, traps):
    """The addresses within the page of the entries of `traps`."""
    heads = re.split(r"<h3\b[^>]*\bid=\"", (site / PAGE).read_text())[1:]
    found = {}
    for head in heads:
        trap = re.search(r"Trap: <code>([a-z0-9-]+)</code>", head)
        found[trap and trap[1]] = head.partition('"')[0]
    return [found[trap] for trap in traps.split()]


def test_each_pasted_message_finds_its_entry_first(site, chromium):
    playwright = pytest.importorskip("playwright.sync_api")
    assert len(MESSAGES) >= 70
    wrong = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto((site / PAGE).as_uri())
        field = page.locator(".search input")
        for message, traps in MESSAGES:
            field.fill("")
            field.fill(message)
            first = page.locator("#found a").first.get_attribute("href", timeout=30_000)
            if not any(first.endswith(f"{PAGE}#{anchor}") for anchor in anchors_of(site, traps)):
                wrong.append((message, first))
        browser.close()
    assert not wrong


def test_nearly_every_entry_is_among_the_pasted_messages():
    asked = {trap for _, traps in MESSAGES for trap in traps.split()}
    assert asked <= set(BY_TRAP) and len(set(BY_TRAP) - asked) <= 3
