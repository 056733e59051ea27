"""Every method of the distribution: what it is, where it lives, whether it is here yet. `hf-ext list` prints it.

To add a method, add its row: the architecture test checks that a method marked "available" has its folder and that a
folder has its row.
"""

from dataclasses import dataclass
from typing import Literal

WINGS = (
    "quantizers",
    "kernels",
    "cache_impls",
    "model_patches",
    "trainers",
    "adapters",
    "generation",
    "tasks",
    "metrics",
)
STATUSES = ("available", "planned")


@dataclass(frozen=True)
class Method:
    """One method of one paper (or one kernel) at one extension point.

    Attributes:
        name: Folder name inside the wing, and what commands call the method.
        wing: Root folder: the extension point.
        title: Title of the paper; of a kernel, what it computes.
        summary: What it does for its user, in one line.
        status: `"available"` (in this version) or `"planned"`.
        venue: Where the paper was published; empty for a kernel.
        arxiv: arXiv identifier, empty when none is known.
        also: Further folders that belong to the method, as `wing/name`.
    """

    name: str
    wing: str
    title: str
    summary: str
    status: Literal["available", "planned"] = "planned"
    venue: str = "ICML 2026"
    arxiv: str = ""
    also: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Path of the method's folder from the root of the repository."""
        return f"{self.wing}/{self.name}"


METHODS: tuple[Method, ...] = (
    Method(
        name="mxfp4",
        wing="quantizers",
        title="Unveiling the Potential of Quantization with MXFP4: Strategies for Quantization Error Reduction",
        summary="4-bit weights and activations: MXFP4 with overflow-aware and macro-block scaling",
        status="available",
        arxiv="2603.08713",
    ),
    Method(
        name="mxfp4_gemm",
        wing="kernels",
        title="Quantise, dequantise and multiply MXFP4 tensors, with macro-block scales",
        summary="Triton kernels of the mxfp4 quantizer (W4A16 and W4A4)",
        status="available",
        venue="",
    ),
    Method(
        name="patternkv_attention",
        wing="kernels",
        title="Decode attention straight over a packed PatternKV cache",
        summary="Triton kernel of the patternkv cache",
        status="available",
        venue="",
    ),
    Method(
        name="flash_lora_attention",
        wing="kernels",
        title="Attention whose values are a base part plus a low-rank part that is never expanded",
        summary="Triton kernel of the lragent cache",
        status="available",
        venue="",
    ),
    Method(
        name="patternkv",
        wing="cache_impls",
        title="PatternKV: Flattening KV Representation Expands Quantization Headroom",
        summary="2-, 4- and 8-bit KV cache that quantizes the residual to mined patterns",
        status="available",
        arxiv="2510.05176",
    ),
    Method(
        name="lragent",
        wing="cache_impls",
        title="LRAgent: Efficient KV Cache Sharing for Multi-LoRA LLM Agents",
        summary="One shared base cache and low-rank caches for agents that are LoRA adapters of one model",
        status="available",
    ),
    Method(
        name="sivs",
        wing="cache_impls",
        title="Semantic Impact-driven Visual Scheduling (SIVS)",
        summary="Keeps the image tokens active that move the output distribution, parks the rest on the host",
    ),
    Method(
        name="turboconn",
        wing="model_patches",
        title="Turbo Connection: Reasoning as Information Flow from Higher to Lower Layers",
        summary="Links from higher layers of one token to lower layers of the next",
        status="available",
        arxiv="2602.17993",
    ),
    Method(
        name="circle_rope",
        wing="model_patches",
        title="Circle-RoPE: Cone-like Decoupled Rotary Positional Embedding for Vision-Language Models",
        summary="Image positions on a circle that is equally far from every text token",
        arxiv="2505.16416",
    ),
    Method(
        name="nitp",
        wing="model_patches",
        title="NITP: Next Implicit Token Prediction for LLM Pre-training",
        summary="A training-only loss that predicts the shallow-layer state of the next token",
        arxiv="2605.24956",
    ),
    Method(
        name="cat",
        wing="trainers",
        title="Compute as Teacher: Turning Inference Compute Into Reference-Free Supervision",
        summary="GRPO without labels: rollouts are merged into a pseudo-reference that grades them",
        status="available",
    ),
    Method(
        name="coherence_grpo",
        wing="trainers",
        title="Distributional Alignment Games for Answer-Level Fine-Tuning",
        summary="GRPO on the distribution of final answers: diversity, coherence, constraints",
    ),
    Method(
        name="arew",
        wing="trainers",
        title="On Information Self-Locking in Reinforcement Learning for Active Reasoning of LLM agents",
        summary="Moves advantage inside a trajectory from bad turns to good turns",
        also=("tasks/active_reasoning",),
    ),
    Method(
        name="empower",
        wing="trainers",
        title="Training LLM Agents to Empower Humans",
        summary="Fine-tunes assistants to write what is predictable and stop where the person decides",
        arxiv="2510.13709",
    ),
    Method(
        name="bridge_garden",
        wing="trainers",
        title="The Bridge-Garden Dilemma in LLM Distillation: Why Mixing Hard and Soft Labels Works",
        summary="Distillation that mixes hard and soft labels token by token",
        arxiv="2605.26246",
    ),
    Method(
        name="ctm",
        wing="adapters",
        title="Compress then Merge: From Multiple LoRAs into One Low-Rank Adapter",
        summary="Several LoRA adapters into one of rank r, merged inside subspaces that all share",
        status="available",
        arxiv="2606.03723",
    ),
    Method(
        name="watermarking",
        wing="generation",
        title="LORD-GoF: A Robust Online Detection Approach for LLM Watermarks in Sparse and Mixed Streams",
        summary="Watermarks, and their online detection with a bounded false discovery rate",
        also=("metrics/online_fdr",),
    ),
    Method(
        name="looping",
        wing="generation",
        title="Wait, Wait, Wait... Why Do Reasoning Models Loop?",
        summary="Detects and stops runaway repetition, offline and while generating",
        arxiv="2512.12895",
        also=("tasks/graph_walk", "metrics/looping"),
    ),
    Method(
        name="oracle",
        wing="tasks",
        title="Oracle: Investigating Advanced Reasoning of Large Language Models via Black-Box Interaction",
        summary="Black boxes to be explored by queries and then predicted",
    ),
    Method(
        name="sambal",
        wing="tasks",
        title="Learning syntax without semantics: Disentangled tiny language models",
        summary="Grammatical nonsense corpora by constrained replacement of words",
        also=("metrics/minimal_pairs",),
    ),
    Method(
        name="recsys_audit",
        wing="tasks",
        title=(
            "VenomRec: Cross-Modal Interactive Poisoning for Targeted Promotion in Multimodal LLM Recommender Systems"
        ),
        summary="How much exposure an item can gain in your multimodal recommender by an edit of its listing",
        also=("metrics/exposure_rate",),
    ),
    Method(
        name="dsf",
        wing="metrics",
        title="On the Limits of LLM Adaptability: Impact of Model-Internalized Priors on Annotation Task Performance",
        summary="Does the model's own idea of a label agree with your definition, and can a prompt repair it",
        arxiv="2606.00467",
        also=("metrics/rescue_rate",),
    ),
)


def list_methods(wing: str | None = None, status: str | None = None) -> list[Method]:
    """List the methods of the distribution, in the order of the wings.

    Args:
        wing: Only this extension point, for example `"quantizers"`.
        status: Only `"available"` or only `"planned"` methods.

    Raises:
        ValueError: Unknown wing or status.
    """
    if wing is not None and wing not in WINGS:
        raise ValueError(f"wing is {wing!r}; it must be one of {', '.join(WINGS)}")
    if status is not None and status not in STATUSES:
        raise ValueError(f"status is {status!r}; it must be one of {', '.join(STATUSES)}")
    chosen = [m for m in METHODS if wing in (None, m.wing) and status in (None, m.status)]
    return sorted(chosen, key=lambda method: WINGS.index(method.wing))
