"""TRL's side of the step benchmark: `python trl_side.py SHAPE_JSON EVENTS_JSONL`, in TRL's own environment.

GRPOTrainer as it comes but for what the comparison fixes: the same batch, prompts in the same order, learning rate and
reward; no KL (its default); float32 master weights under bfloat16 autocast, as Tidegate trains. Answers come from
transformers' `generate`, which GRPOTrainer uses without a vLLM server.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shape import Events, Shape, load_shape


def reward_of(lengths: list[int]) -> Any:
    """Return a reward function: VADER's sentiment of each answer. It leaves the answers' lengths in `lengths`."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()

    def sentiment(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths[:] = [len(ids) for ids in completion_ids]
        return [analyzer.polarity_scores(messages[0]["content"])["compound"] for messages in completions]

    return sentiment


def train(shape: Shape, events: Events) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    lengths: list[int] = []
    sampling_seconds = [0.0]

    class TimedTrainer(GRPOTrainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            start = time.monotonic()
            try:
                return super()._prepare_inputs(inputs)
            finally:
                sampling_seconds[0] += time.monotonic() - start

    class StepEvents(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.start, self.start_cpu = time.monotonic(), time.process_time()
            sampling_seconds[0] = 0.0
            events.add("begin", step=state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.monotonic() - self.start
            cpu_seconds = time.process_time() - self.start_cpu
            phases = {"rollout_and_reward": sampling_seconds[0], "train": seconds - sampling_seconds[0]}
            events.add(
                "step",
                step=state.global_step,
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                lengths=list(lengths),
                phases=phases,
            )

    with tempfile.TemporaryDirectory() as output:
        answers = shape.prompts_per_step * shape.group_size
        config = GRPOConfig(
            output_dir=output,
            use_cpu=not torch.cuda.is_available(),
            bf16=True,
            max_steps=shape.num_steps,
            per_device_train_batch_size=shape.micro_batch_size,
            gradient_accumulation_steps=answers // shape.micro_batch_size,
            num_generations=shape.group_size,
            max_completion_length=shape.max_new_tokens,
            learning_rate=shape.learning_rate,
            lr_scheduler_type="constant",
            gradient_checkpointing=shape.recompute,
            shuffle_dataset=False,
            seed=shape.seed,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(shape.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(shape.model),
            reward_funcs=reward_of(lengths),
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": [{"role": "user", "content": prompt}]} for prompt in shape.prompts]
            ),
            callbacks=[StepEvents()],
        )
        events.add("built", threads=torch.get_num_threads(), weights=str(next(trainer.model.parameters()).dtype))
        trainer.train()
        rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
        events.add("done", rewards=rewards)


if __name__ == "__main__":
    train(load_shape(Path(sys.argv[1])), Events(Path(sys.argv[2])))
