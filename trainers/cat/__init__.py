"""CaT (Compute as Teacher): GRPO without labels, taught by its own rollouts. See README.md in this folder."""

from hf_ext._lazy import attach

_EXPORTS = {
    "hf_ext.trainers.cat.anchor": ["Anchor"],
    "hf_ext.trainers.cat.cat_config": ["CaTConfig"],
    "hf_ext.trainers.cat.cat_trainer": ["CaTTrainer"],
    "hf_ext.trainers.cat.inference": ["make_sft_dataset", "propose_rubric", "score", "synthesize"],
    "hf_ext.trainers.cat.judges": [
        "CallableJudge",
        "ChatJudge",
        "EndpointJudge",
        "JudgeError",
        "JudgeItem",
        "TransformersJudge",
    ],
    "hf_ext.trainers.cat.rubrics": ["parse_rubric"],
}
_NEEDS = {"trl": ["Anchor", "CaTConfig", "CaTTrainer", "make_sft_dataset", "propose_rubric", "score", "synthesize"]}
__getattr__, __dir__, __all__ = attach(
    __name__, _EXPORTS, submodules=["aggregators", "audit", "prompts", "rewards", "scoring"], needs=_NEEDS
)
