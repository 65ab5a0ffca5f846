"""Stage `sft_intake`: take in a supervised fine-tuned checkpoint, or say why not.

Whatever the source, the output is a Hugging Face folder with safetensors of one type, a tokenizer with a chat template
and a pad token of its own, and a generation config without sampling settings: those come from Tidegate's config alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from training_core.config.intake import IntakeConfig
from training_core.errors import ArtifactError
from training_core.models.chat import encode_conversation, tokenize_text
from training_core.models.chat_setup import PROBE_ANSWER, PROBE_PROMPT, ChatSetup, eos_ids, set_up_chat
from training_core.models.gguf import load_gguf
from training_core.models.gguf_file import is_gguf
from training_core.models.hub import fetch_from_hub
from training_core.models.loading import (
    DTYPES,
    cast_state_dict,
    copy_tokenizer_files,
    load_causal_lm,
    load_tokenizer,
    update_json,
)
from training_core.models.source_files import (
    check_folder,
    check_source,
    describe_files,
    read_object,
    read_template,
    stored_dtype,
)
from training_core.protocol.atomic import read_json, write_json
from training_core.protocol.context import StageContext
from training_core.protocol.digests import weights_digest
from training_core.records import StageOutcome
from training_core.rl.forward import difference_from_logits
from training_core.rollout.batch import MicroBatch, TrajectoryBatch, build_micro_batch

PROBE_TEXTS = ("Hello  world, 123!", "Ça va? \n\n it's 12°", "<b>tags</b>\tand a tab", "日本語 🙂")
NUM_STEPS = 4
SIZES = ("vocab_size", "max_position_embeddings")


@dataclass
class Source:
    """A loaded checkpoint."""

    path: Path
    kind: str
    """folder, gguf or hub."""
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: str
    """Type of the weights in the source, as far as it can be stored again."""
    generation_eos_ids: list[int] = field(default_factory=list)


def run(context: StageContext) -> StageOutcome:
    """Check the source, store it, and check what was stored.

    Raises:
        ConfigurationError: the source or template does not exist, or a hub source while offline.
        ArtifactError: the checkpoint is refused or damaged; the message names the file.
        ServerUnreachableError: the hub does not answer.
    """
    config = IntakeConfig.model_validate(context.spec.config)
    context.progress(0, NUM_STEPS, "check files")
    source = load_source(context, config)
    context.progress(1, NUM_STEPS, "check tokenizer")
    probes = [tokenize_text(source.tokenizer, text) for text in PROBE_TEXTS]
    setup = checked_chat(source, given_template(context, config))
    check_weights_finite(source.model, source.path)
    context.progress(2, NUM_STEPS, "store")
    dtype = source.dtype if config.dtype == "source" else config.dtype
    model_path, tokenizer_path = context.new_output("model"), context.new_output("tokenizer")
    store(source, setup, model_path, dtype)
    copy_tokenizer_files(model_path, tokenizer_path)
    context.progress(3, NUM_STEPS, "check the stored model")
    num_parameters = check_stored(model_path, probes)
    context.progress(NUM_STEPS, NUM_STEPS, "done")
    return StageOutcome(
        outputs={"model": "outputs/model", "tokenizer": "outputs/tokenizer"},
        summary={
            **describe_model(model_path, setup, dtype, num_parameters),
            "source_kind": source.kind,
            "source_files": describe_files(source.path),
            "adjustments": setup.adjustments,
        },
    )


def load_source(context: StageContext, config: IntakeConfig) -> Source:
    """Return the checked and loaded checkpoint: an input of the stage, or a hub repository."""
    if config.hub_repository is not None:
        return load_folder(fetch_from_hub(config.hub_repository, str(config.revision)), "hub")
    path = context.input_path("source")
    check_source(path)
    if is_gguf(path):
        model, tokenizer = load_gguf(path)
        return Source(path, "gguf", model, tokenizer, "bfloat16", eos_ids(model.config.eos_token_id))
    return load_folder(path, "folder")


def load_folder(path: Path, kind: str) -> Source:
    check_folder(path)
    check_architecture(path)
    dtype = stored_dtype(path)
    model = load_causal_lm(path, dtype=DTYPES.get(dtype, torch.float32))
    generation = path / "generation_config.json"
    ids = eos_ids(read_object(generation).get("eos_token_id")) if generation.is_file() else []
    return Source(path, kind, model, load_tokenizer(path), dtype if dtype in DTYPES else "float32", ids)


def check_architecture(folder: Path) -> None:
    """Refuse what transformers does not know as a causal language model.

    Raises:
        ArtifactError: names the model type.
    """
    config = read_object(folder / "config.json")
    model_type, architectures = str(config.get("model_type")), config.get("architectures") or []
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ArtifactError(
            f"{folder / 'config.json'}: model_type {model_type!r} is no causal language model that transformers knows. "
            "Name a checkpoint of a decoder model whose type it has, such as llama, mistral or qwen2"
        )
    expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    if architectures and expected not in architectures:
        raise ArtifactError(
            f"{folder / 'config.json'}: architectures is {architectures}, a causal language model of type {model_type} "
            f"is {expected}. A reward model or an encoder cannot be the SFT checkpoint: name "
            "the model that was fine-tuned to answer"
        )
    check_sizes(folder, model_type)


def check_sizes(folder: Path, model_type: str) -> None:
    """Refuse a config whose vocabulary and context belong to a part of the model, such as one of text and images.

    Raises:
        ArtifactError: says what the config lacks.
    """
    try:
        config: Any = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if missing := [name for name in SIZES if not isinstance(getattr(config, name, None), int)]:
        raise ArtifactError(
            f"{folder / 'config.json'}: a model of type {model_type} has no {' and no '.join(missing)} of its own. "
            "Name a checkpoint that is a language model alone, not one that wraps it with other parts"
        )


def checked_chat(source: Source, template: str | None) -> ChatSetup:
    """Return how the checkpoint chats, with the given template or its own.

    Raises:
        ArtifactError: template and tokenizer are of no use; the message says where the template comes from.
    """
    embedding: Any = source.model.get_input_embeddings()
    try:
        return set_up_chat(source.tokenizer, template, source.generation_eos_ids, int(embedding.weight.shape[0]))
    except ArtifactError as error:
        given = "" if template is None else " with the template of checkpoint.chat_template"
        raise ArtifactError(f"{source.path}{given}: {error}") from error


def given_template(context: StageContext, config: IntakeConfig) -> str | None:
    return None if config.chat_template is None else read_template(context.input_path("chat_template"))


def check_weights_finite(model: PreTrainedModel, path: Path) -> None:
    """Refuse NaN and infinity in the weights.

    Raises:
        ArtifactError: names the first such tensor.
    """
    for name, value in model.state_dict().items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ArtifactError(f"{path}: tensor {name} holds NaN or infinity. Use a checkpoint from before that")


def store(source: Source, setup: ChatSetup, path: Path, dtype: str) -> None:
    """Write model and tokenizer; no byte depends on where the source lies."""
    tokenizer, model = source.tokenizer, source.model
    limit = int(model.config.max_position_embeddings)
    tokenizer.model_max_length = limit
    state = cast_state_dict(model, DTYPES[dtype])
    # Sampling settings go, before transformers refuses to save the ones it finds odd.
    model.generation_config = new_generation_config()
    model.save_pretrained(path, state_dict=state, max_shard_size="1000GB")
    tokenizer.save_pretrained(path)
    bos = None if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)
    eos = setup.eos_token_ids[0] if len(setup.eos_token_ids) == 1 else setup.eos_token_ids
    tokens = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": setup.pad_token_id}
    update_json(path / "config.json", dtype=dtype, use_cache=True, **tokens)
    write_json(path / "generation_config.json", {key: value for key, value in tokens.items() if value is not None})
    for name, keys in (
        ("config.json", ("_name_or_path", "_model_name_or_path")),
        ("tokenizer_config.json", ("is_local", "local_files_only", "name_or_path")),
    ):
        content = read_json(path / name)
        write_json(path / name, {key: value for key, value in sorted(content.items()) if key not in keys})


def new_generation_config() -> Any:
    make: Any = GenerationConfig
    return make()


def check_stored(path: Path, probes: list[list[int]]) -> int:
    """Load what was stored, compare its tokenizer with the source's, run one forward pass; return the parameters.

    Raises:
        ArtifactError: token ids differ, or logits are not finite or not the hidden states times the head.
    """
    check_folder(path)
    tokenizer, model = load_tokenizer(path), load_causal_lm(path, dtype=torch.float32)
    for text, ids in zip(PROBE_TEXTS, probes, strict=True):
        if tokenize_text(tokenizer, text) != ids:
            raise ArtifactError(
                f"the stored tokenizer reads {text!r} differently from the source's: it cannot be stored"
            )
    ids, num_prompt_tokens = encode_conversation(tokenizer, PROBE_PROMPT, PROBE_ANSWER)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
    if not bool(torch.isfinite(logits).all()):
        raise ArtifactError("one forward pass gives NaN or infinite logits: the weights or the config are damaged")
    # Policy training and evaluation apply the head themselves; the checkpoint is refused here, before anything trains.
    if difference := difference_from_logits(model, as_micro_batch(ids, num_prompt_tokens)):
        raise ArtifactError(
            f"{difference}, which policy training does not do. Name a checkpoint without a soft cap, scale or bias on "
            "its logits, such as llama, mistral or qwen2"
        )
    return sum(parameter.numel() for parameter in model.parameters())


def as_micro_batch(ids: list[int], num_prompt_tokens: int) -> MicroBatch:
    """Return a conversation as one answer to one prompt."""
    answer = tuple(ids[num_prompt_tokens:])
    mask = torch.ones(1, len(answer), dtype=torch.bool)
    batch = TrajectoryBatch([tuple(ids[:num_prompt_tokens])], [answer], mask, torch.zeros(mask.shape))
    return build_micro_batch(batch, [0], pad_token_id=0, device=torch.device("cpu"))


def describe_model(path: Path, setup: ChatSetup, dtype: str, num_parameters: int) -> dict[str, Any]:
    config: Any = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    return {
        "weights_sha256": weights_digest(path),
        "num_parameters": num_parameters,
        "architecture": config.architectures[0],
        "dtype": dtype,
        **{name: getattr(config, name) for name in SIZES},
        "eos_token_ids": setup.eos_token_ids,
        "pad_token_id": setup.pad_token_id,
    }
