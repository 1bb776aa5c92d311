"""Tiny models that read images or sound, too."""

from collections.abc import Callable

import transformers as t
from tiny import SIZES
from transformers import PreTrainedModel

VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL = {**VISION, "head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN = {**SIZES, "rope_parameters": ROPE}
QWEN2_VISION = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
QWEN25_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "out_hidden_size": 64,
    "num_heads": 4,
}
QWEN3_VISION = {**QWEN25_VISION, "deepstack_visual_indexes": [0]}
QWEN35 = {
    **SIZES,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LLAMA4 = {**SIZES, "intermediate_size_mlp": 128, "num_local_experts": 2}
LLAMA4_VISION = {
    **VISION,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
}
MLLAMA = {
    **SIZES,
    "num_hidden_layers": 4,
    "cross_attention_layers": [1, 3],
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
MLLAMA_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "max_num_tiles": 1,
    "vision_output_dim": 128,
    "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1]],
}
SOUND = {
    "model_type": "voxtral_encoder",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

MULTIMODAL: dict[str, Callable[[], PreTrainedModel]] = {
    "mllama": lambda: t.MllamaForConditionalGeneration(
        t.MllamaConfig(text_config=MLLAMA, vision_config=MLLAMA_VISION)
    ),
    "gemma3": lambda: t.Gemma3ForConditionalGeneration(
        t.Gemma3Config(text_config=SIZES, vision_config=VISION, mm_tokens_per_image=4)
    ),
    "llava": lambda: t.LlavaForConditionalGeneration(
        t.LlavaConfig(
            text_config=t.LlamaConfig(**SIZES), vision_config=t.CLIPVisionConfig(**VISION)
        )
    ),
    "qwen2_vl": lambda: t.Qwen2VLForConditionalGeneration(
        t.Qwen2VLConfig(text_config=QWEN, vision_config=QWEN2_VISION)
    ),
    "qwen2_5_vl": lambda: t.Qwen2_5_VLForConditionalGeneration(
        t.Qwen2_5_VLConfig(text_config=QWEN, vision_config=QWEN25_VISION)
    ),
    "mistral3": lambda: t.Mistral3ForConditionalGeneration(
        t.Mistral3Config(
            text_config=t.MistralConfig(**SIZES), vision_config=t.PixtralVisionConfig(**PIXTRAL)
        )
    ),
    "qwen3_vl": lambda: t.Qwen3VLForConditionalGeneration(
        t.Qwen3VLConfig(text_config=QWEN, vision_config=QWEN3_VISION)
    ),
    "qwen3_5": lambda: t.Qwen3_5ForConditionalGeneration(
        t.Qwen3_5Config(text_config=QWEN35, vision_config=QWEN3_VISION)
    ),
    "voxtral": lambda: t.VoxtralForConditionalGeneration(
        t.VoxtralConfig(text_config=t.LlamaConfig(**SIZES), audio_config=SOUND)
    ),
    "llama4": lambda: t.Llama4ForConditionalGeneration(
        t.Llama4Config(text_config=LLAMA4, vision_config=LLAMA4_VISION)
    ),
}
