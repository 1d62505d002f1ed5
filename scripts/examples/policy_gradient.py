"""Ten steps of reinforcement learning with a live daemon, which serves the policy of each step.

    odriver serve --enable-lora --adapter-root adapters
    python -m scripts.examples.policy_gradient --adapter-root adapters     a LoRA adapter is loaded anew
    python -m scripts.examples.policy_gradient --weights                   the weights themselves change

Each step draws a group of completions for each of a few prompts from the daemon, with their
log-probabilities, and rewards them. The policy gradient (Williams 1992) weighs each with how far
its reward is above its group's mean (Shao et al. 2024) and with the importance ratio of trainer
and daemon. Then the daemon gets the new policy while it serves.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.hub.names import DEMO_MODEL
from ipc.client import Client
from ipc.control_client import ControlClient
from ipc.wire.completion import Completion, whole
from scripts.examples.lora import Lora, changed, save_adapter
from scripts.examples.policy import Outcome, Sample, Trainer
from scripts.examples.trainable import Trainable
from scripts.processes import end_on_sigterm, odriver

NAME = "policy"
"""Of the adapter, and of its directory."""
STEPS = 10
PROMPTS = ("Once upon a time", "One day, a fox", "Long ago", "Far away", "In a quiet wood")
GROUP = 16
"""Completions of each prompt in each step."""
MAX_TOKENS = 32
FEW_SHAPES = ("--max-num-seqs", "32", "--max-num-batched-tokens", "32", "--max-model-len", "64")
"""Of a daemon for short texts, which has less to compile."""
START_TIMEOUT = 300.0
"""Seconds that a daemon has to become ready."""
SEEDS = 10_000
"""Seeds of samples that a run can have."""

Publish = Callable[[Lora], None]
"""Gives the daemon a policy, and returns when requests are served with it."""


def train(trainer: Trainer, draw: Callable[[int], list[Sample]], publish: Publish) -> list[Outcome]:
    """All steps, each with samples of its own policy; the last policy is served on."""
    publish(trainer.lora)
    outcomes = []
    for number in range(1, STEPS + 1):
        outcome = trainer.learn(draw(number))
        publish(trainer.lora)
        before = f"; by {outcome.difference_before:.2f} from the policy before" if outcomes else ""
        print(
            f"step {number:2d}  reward {outcome.reward:.3f}  log-probabilities differ by {outcome.difference:.0e}{before}"
        )
        outcomes.append(outcome)
    return outcomes


def draw_samples(client: Client, tokenizer: PreTrainedTokenizerFast, seed: int) -> list[Sample]:
    """A group of each prompt; all are drawn at once."""
    prompts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    streams = [
        client.generate(
            ids,
            n=GROUP,
            seed=seed + GROUP * group,  # sample i has the i-th seed after it
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            top_p=1.0,
            logprobs=0,
            stream=False,
        )
        for group, ids in enumerate(prompts)
    ]
    answers = [whole(list(stream)) for stream in streams]
    return [
        sample
        for group, (ids, answer) in enumerate(zip(prompts, answers, strict=True))
        for sample in _samples(group, ids, answer)
    ]


def _samples(group: int, prompt_ids: list[int], answer: Completion) -> Iterator[Sample]:
    for choice in answer.choices:
        tokens = zip(choice.token_ids, choice.logprobs, strict=True)
        log_probs = [found[token_id].logprob for token_id, found in tokens]
        yield Sample(group, prompt_ids, choice.token_ids, log_probs, choice.text)


def publish_adapter(control: ControlClient, root: Path) -> Publish:
    """By an adapter below the daemon's ``--adapter-root``, in place of the one before."""

    def publish(lora: Lora) -> None:
        save_adapter(lora, root / NAME)
        control.load_adapter(NAME)

    return publish


def publish_weights(control: ControlClient, model: Trainable) -> Publish:
    """By the changed kernels alone, with the names that they have in the checkpoint."""

    def publish(lora: Lora) -> None:
        kernels = changed(model.tensors, lora)
        control.update_weights({name: np.asarray(kernel) for name, kernel in kernels.items()})

    return publish


def main(arguments: list[str] | None = None) -> list[Outcome]:
    """Train, and say how the reward has changed."""
    options = _parser().parse_args(arguments)
    model, tokenizer = Trainable(DEMO_MODEL), AutoTokenizer.from_pretrained(DEMO_MODEL)
    adapter_root = None if options.weights else options.adapter_root
    with (
        _address(options) as address,
        Client(address, timeout=START_TIMEOUT) as base,
        ControlClient(address) as control,
    ):
        client = base if adapter_root is None else base.of_model(NAME)
        publish = publish_weights(control, model) if adapter_root is None else publish_adapter(control, adapter_root)

        def draw(number: int) -> list[Sample]:
            return draw_samples(client, tokenizer, SEEDS * options.seed + GROUP * len(PROMPTS) * number)

        outcomes = train(Trainer(model, options.seed), draw, publish)
    first, last = (float(np.mean([outcome.reward for outcome in part])) for part in (outcomes[:3], outcomes[-3:]))
    print(f"mean reward: {first:.3f} in the first three steps, {last:.3f} in the last three")
    return outcomes


@contextmanager
def _address(options: argparse.Namespace) -> Iterator[str | None]:
    """The daemon's; one of this program's own ends with it."""
    if not options.own_daemon:
        yield options.connect
        return
    flags = [] if options.weights else ["--enable-lora", "--adapter-root", str(options.adapter_root)]
    with TemporaryDirectory(prefix="odriver-") as directory:
        address = f"ipc://{directory}/odriver.sock"
        with odriver("serve", "--bind", address, "--log-level", "warning", *FEW_SHAPES, *flags):
            yield address


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    policy = parser.add_mutually_exclusive_group(required=True)
    policy.add_argument("--adapter-root", type=Path, metavar="DIR", help="the daemon's: the policy is an adapter in it")
    policy.add_argument("--weights", action="store_true", help="the policy is the daemon's weights")
    daemon = parser.add_mutually_exclusive_group()
    daemon.add_argument("--connect", metavar="ADDR", help="where the daemon listens (default: as odriver complete)")
    daemon.add_argument("--own-daemon", action="store_true", help="start a daemon, which ends with this program")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the trainer and the samples")
    return parser


if __name__ == "__main__":
    end_on_sigterm()
    main()
