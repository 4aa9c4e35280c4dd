"""The node for people who study decoders: other parts and thresholds than a decoder's own."""

from __future__ import annotations

from typing import get_args

from comfy_api.latest import io

from ..decoders import MAX_BRANCHES, DecoderOptions
from ..decoders.interface import Grouping, Initialise, Redraft, Verify
from . import sockets

OWN = "auto"
CHOICES = {
    "redraft": [OWN, *get_args(Redraft)],
    "verify": [OWN, *get_args(Verify)],
    "initialise": [OWN, *get_args(Initialise)],
    "grouping": list(get_args(Grouping)),
}
GROUP_WIDGETS = ["grouping", "group_size", "group_probability_gap", "group_distance"]
DEFAULTS = DecoderOptions()


def shown_widgets() -> dict[str, list[str]]:
    """Which widgets each value of `verify` uses; the page hides the others."""
    return {choice: GROUP_WIDGETS if choice in (OWN, "grouped") else [] for choice in CHOICES["verify"]}


class SpecARDecoderOptions(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARDecoderOptions",
            display_name="Speculative Decoder Options",
            category=sockets.CATEGORY,
            description="Replaces parts of the sampler's decoder. The statistics name the promise that is left.",
            inputs=[
                io.Combo.Input(
                    "redraft",
                    options=CHOICES["redraft"],
                    default=OWN,
                    tooltip="How the draws of one pass are coupled to those of the last. auto: the decoder's own way. "
                    "Without effect on draft-model.",
                ),
                sockets.annotated(
                    io.Combo.Input(
                        "verify",
                        options=CHOICES["verify"],
                        default=OWN,
                        tooltip="When a draft is kept. grouped is approximate, exact gives the picture of ar.",
                    ),
                    speculativear_widgets=shown_widgets(),
                ),
                io.Combo.Input(
                    "initialise",
                    options=CHOICES["initialise"],
                    default=OWN,
                    tooltip="The first guess for a position that just entered the window. "
                    "Without effect on draft-model.",
                ),
                io.Combo.Input(
                    "grouping",
                    options=CHOICES["grouping"],
                    default=DEFAULTS.grouping,
                    tooltip="For grouped verification. dynamic: codes of like probability in this pass. "
                    "static: codes that look alike.",
                ),
                io.Int.Input(
                    "group_size",
                    default=DEFAULTS.group_size,
                    min=1,
                    max=16384,
                    tooltip="For grouped verification. Most codes that may stand for one another.",
                ),
                io.Float.Input(
                    "group_probability_gap",
                    default=DEFAULTS.group_probability_gap,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="For grouped verification. Codes of one dynamic group differ by no more than this in "
                    "probability.",
                ),
                io.Float.Input(
                    "group_distance",
                    default=DEFAULTS.group_distance,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="For grouped verification. How far apart codes of one dynamic group may lie, in "
                    "nearest-neighbour distances. 0: no limit.",
                ),
                io.Int.Input(
                    "branches",
                    optional=True,
                    default=DEFAULTS.branches,
                    min=0,
                    max=MAX_BRANCHES,
                    tooltip="For seed-exact: how many first guesses a pass tries. More find the next code more often "
                    "and make a pass longer. 1: the best guess alone. 0: what is fastest here, by a short measurement.",
                ),
                io.Int.Input(
                    "branch_length",
                    optional=True,
                    default=DEFAULTS.branch_length,
                    min=1,
                    max=64,
                    tooltip="For seed-exact with branches: positions that each further guess is followed for.",
                ),
            ],
            outputs=[sockets.Options.Output(display_name="options")],
        )

    @classmethod
    def validate_inputs(
        cls,
        redraft: str | None = None,
        verify: str | None = None,
        initialise: str | None = None,
        grouping: str | None = None,
    ) -> bool | str:
        given = {"redraft": redraft, "verify": verify, "initialise": initialise, "grouping": grouping}
        refusals = (sockets.not_listed(name, value, CHOICES[name]) for name, value in given.items())
        return next((refusal for refusal in refusals if refusal), True)

    @classmethod
    def execute(
        cls,
        redraft: str,
        verify: str,
        initialise: str,
        grouping: str,
        group_size: int,
        group_probability_gap: float,
        group_distance: float,
        branches: int = DEFAULTS.branches,
        branch_length: int = DEFAULTS.branch_length,
    ) -> io.NodeOutput:
        options = DecoderOptions(
            redraft=None if redraft == OWN else redraft,
            verify=None if verify == OWN else verify,
            initialise=None if initialise == OWN else initialise,
            grouping=grouping,
            group_size=group_size,
            group_probability_gap=group_probability_gap,
            group_distance=group_distance,
            branches=branches,
            branch_length=branch_length,
        )
        return io.NodeOutput(options)
