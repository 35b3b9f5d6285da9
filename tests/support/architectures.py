"""Small models of many kinds, from the configs of transformers, and what each is given to learn."""

from __future__ import annotations

import torch
import transformers as hf

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def ids(generator, length=12):
    return torch.randint(3, 64, (2, length), generator=generator)


def language(generator):
    tokens = ids(generator)
    return {"input_ids": tokens, "labels": tokens}


def translation(generator):
    return {"input_ids": ids(generator), "labels": ids(generator, 8)}


def classes(generator):
    return {"input_ids": ids(generator), "labels": torch.randint(0, 2, (2,), generator=generator)}


def images(generator):
    pixels = torch.randn(2, 3, 16, 16, generator=generator).bfloat16()
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (2,), generator=generator)}


def pairs(generator):
    pixels = torch.randn(2, 3, 16, 16, generator=generator).bfloat16()
    return {"input_ids": ids(generator), "pixel_values": pixels, "return_loss": True}


def pictured(generator):
    """Texts in which four places, of a token that is nowhere else, stand for an image."""
    tokens = torch.cat([torch.full((2, 4), 63), ids(generator).clamp(max=62)], 1)
    pixels = torch.randn(2, 3, 16, 16, generator=generator).bfloat16()
    return {"input_ids": tokens, "pixel_values": pixels, "labels": tokens}


def speech(generator):
    waves = torch.randn(2, 400, generator=generator).bfloat16()
    return {"input_values": waves, "labels": torch.randint(1, 32, (2, 3), generator=generator)}


def spectra(generator):
    return {
        "input_features": torch.randn(2, 16, 40, generator=generator).bfloat16(),
        "labels": torch.randint(3, 64, (2, 6), generator=generator),
    }


def _clip():
    return hf.CLIPModel(hf.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16))


def _llava():
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION),
        text_config=hf.LlamaConfig(**GROUPED),
        image_token_id=63,
        vision_feature_layer=-1,
    )
    return hf.LlavaForConditionalGeneration(config)


def _of(model, config, **sizes):
    return lambda: getattr(hf, model)(getattr(hf, config)(**sizes))


ARCHITECTURES = {
    # decoders
    "qwen3": (_of("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=8), language),
    "gemma3, tied": (
        _of("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=8, sliding_window=8),
        language,
    ),
    "phi3": (_of("Phi3ForCausalLM", "Phi3Config", **GROUPED), language),
    "opt, tied": (_of("OPTForCausalLM", "OPTConfig", **TEXT, ffn_dim=48, word_embed_proj_dim=32), language),
    "gpt-neox": (_of("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT), language),
    "falcon, tied": (_of("FalconForCausalLM", "FalconConfig", **TEXT), language),
    "bloom, tied": (
        _of("BloomForCausalLM", "BloomConfig", vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        language,
    ),
    # encoders
    "bert, tied": (_of("BertForMaskedLM", "BertConfig", **TEXT), language),
    "modernbert": (_of("ModernBertForMaskedLM", "ModernBertConfig", **TEXT), language),
    "deberta-v2": (
        _of(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **TEXT,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
        ),
        classes,
    ),
    # encoders and decoders
    "t5, tied": (
        _of(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        translation,
    ),
    "bart, tied": (
        _of(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=64,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
        ),
        translation,
    ),
    # vision, and vision with text
    "vit": (_of("ViTForImageClassification", "ViTConfig", **VISION), images),
    "convnext": (
        _of(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_stages=2,
        ),
        images,
    ),
    "clip": (_clip, pairs),
    "llava": (_llava, pictured),
    # audio
    "wav2vec2, weight norm": (
        _of(
            "Wav2Vec2ForCTC",
            "Wav2Vec2Config",
            **{**TEXT, "vocab_size": 32},
            conv_dim=(16, 16),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            mask_time_prob=0.0,
        ),
        speech,
    ),
    "whisper, tied": (
        _of(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=64,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_mel_bins=16,
            max_source_positions=20,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        spectra,
    ),
    # state spaces, and others without attention
    "mamba": (
        _of(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=64,
            hidden_size=32,
            state_size=4,
            num_hidden_layers=2,
        ),
        language,
    ),
    "mamba2": (
        _of(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            vocab_size=64,
            hidden_size=32,
            state_size=8,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            chunk_size=4,
            num_hidden_layers=2,
        ),
        language,
    ),
    "rwkv": (
        _of("RwkvForCausalLM", "RwkvConfig", vocab_size=64, hidden_size=32, num_hidden_layers=2),
        language,
    ),
    # experts
    "qwen3-moe": (_of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **GROUPED, **EXPERTS, head_dim=8), language),
    "olmoe": (
        _of("OlmoeForCausalLM", "OlmoeConfig", **GROUPED, num_experts=4, num_experts_per_tok=2),
        language,
    ),
    "deepseek-v3": (
        _of(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            **TEXT,
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        language,
    ),
    "gpt-oss": (
        _of(
            "GptOssForCausalLM",
            "GptOssConfig",
            **GROUPED,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        language,
    ),
}
"""Name -> (what builds it, what draws a batch from a generator)."""
