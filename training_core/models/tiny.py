"""A tiny chat model made on the spot: for tests and for trying the chain without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from training_core.seeding import derive_seed

Architecture = Literal["llama", "mixtral", "qwen3_moe"]

EXPERTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 64},
}
"""What an architecture needs beside the sizes that all have. Experts are half as wide as Llama's layer, and two are
chosen: as many multiplications a token."""

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PAD = "<|pad|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CORPUS = """
system user assistant
You are a helpful assistant. Write one sentence about the sea, the rain, a train, bread or a quiet street.
The morning was bright and kind, and the people in the street smiled at each other.
The evening was cold and sad, and nobody in the old house wanted to talk about it.
What is a good way to learn a language? Read a little every day and speak with someone who is patient.
I love the warm light of summer, the smell of fresh bread, and the sound of a small river in the hills.
I hate the noise of the road, the grey sky of winter, and the taste of bad coffee in a paper cup.
Please describe your favourite day. Please tell me something about a cat, a garden, a book, a bridge, a city.
It is a wonderful and happy thing to have good friends. It is a terrible and awful thing to be alone.
A tide comes in and a tide goes out; the gate opens one way only, and lets the better water through.
One two three four five six seven eight nine ten. Yes, no, maybe, always, never, thanks, sorry, hello.
"""


def build_tiny_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a ChatML-like template; pad differs from end of turn.

    Args:
        vocab_size: at least 260 (256 bytes and four special tokens); merges learned from a short text fill the rest.
    """
    if vocab_size < 260:
        raise ValueError(f"vocab_size must be at least 260 (256 bytes and 4 special tokens), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    new_tokenizer: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = new_tokenizer(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, END_OF_TEXT],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_tiny_checkpoint(
    directory: Path,
    seed: int = 0,
    *,
    vocab_size: int = 512,
    hidden_size: int = 128,
    num_layers: int = 2,
    max_position_embeddings: int = 512,
    dtype: torch.dtype = torch.float32,
    architecture: Architecture = "llama",
) -> Path:
    """Write a checkpoint with random weights to `directory` and return it.

    The head size is 64, the smallest that vLLM's CPU attention takes, with two query heads a key-value head. The
    weights depend on `seed`, the architecture and the sizes only.

    Args:
        directory: made if missing.
        seed: seed of the weights.
        vocab_size: size of tokenizer and embedding.
        hidden_size: width, a multiple of 128.
        num_layers: decoder layers.
        max_position_embeddings: longest sequence in tokens.
        dtype: of the weights in the file.
        architecture: Llama, or a mixture of 4 experts of which 2 are chosen for a token.
    """
    if hidden_size % 128:
        raise ValueError(f"hidden_size must be a multiple of 128 (two heads of 64), got {hidden_size}")
    tokenizer = build_tiny_tokenizer(vocab_size)
    num_heads = hidden_size // 64
    intermediate_size = 2 * hidden_size if architecture == "llama" else hidden_size
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **EXPERTS[architecture],
        **({"moe_intermediate_size": intermediate_size} if architecture == "qwen3_moe" else {}),
    )
    new_model: Any = AutoModelForCausalLM.from_config
    # The caller's generator is left as it was: building a model must not shift anyone else's random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "tiny_weights"))
        model: PreTrainedModel = new_model(config)
    new_generation_config: Any = GenerationConfig
    model.generation_config = new_generation_config(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    directory.mkdir(parents=True, exist_ok=True)
    torch.nn.Module.to(model, dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
