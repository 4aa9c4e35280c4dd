"""The node for models of continuous tokens: how many steps of which kind, and the settings of single decoders."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from comfy_api.latest import io

from ..decoders import ContinuousOptions
from ..decoders.interface import DiffusionSampler, GuidanceSchedule, Respacing, SigmaFactor, Verification
from . import sockets

OWN = "auto"
DEFAULTS = ContinuousOptions()
CHOICES = {
    "guidance_schedule": [OWN, *get_args(GuidanceSchedule)],
    "respacing": [OWN, *get_args(Respacing)],
    "diffusion_sampler": list(get_args(DiffusionSampler)),
    "verification": list(get_args(Verification)),
    "sigma_factor": list(get_args(SigmaFactor)),
}
TOOLTIPS = {
    "guidance_schedule": "How cfg grows over the AR steps: constant, linear with the known share, or linear-from-one, "
    "from none in the first step. auto: as the model's authors do.",
    "respacing": "Which times the diffusion steps stop at: even over all of them, or strided from 0 on. "
    "auto: as the model's authors do.",
    "diffusion_sampler": "ddpm draws noise in each step. ddim adds eta times as much; with eta 0 none.",
    "verification": "For cspd. block: the released code's way, nothing is drafted again. prefix: the paper's "
    "Algorithm 1, every draft judged in its context.",
    "sigma_factor": "For cspd. A factor in the acceptance ratio: the paper's, the released code's (its inverse), or "
    "off. prefix with off and softening 1 is exact, and keeps next to nothing.",
}


def _choice(name: str, default: str) -> io.WidgetInput:
    return io.Combo.Input(name, options=CHOICES[name], default=default, tooltip=TOOLTIPS[name])


class SpecARContinuousOptions(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARContinuousOptions",
            display_name="Continuous Decoder Options",
            category=sockets.CATEGORY,
            description="Steps and decoder settings of models with continuous tokens: MAR, xAR, Harmon.",
            inputs=[
                io.Int.Input(
                    "iterations",
                    default=DEFAULTS.iterations,
                    min=0,
                    max=4096,
                    tooltip="AR steps. Fewer make several positions a step: faster, less exact. 0: the model's own.",
                ),
                io.Int.Input(
                    "diffusion_steps",
                    default=DEFAULTS.diffusion_steps,
                    min=0,
                    max=1000,
                    tooltip="Steps from noise to a token. 0: the model's own.",
                ),
                _choice("guidance_schedule", OWN),
                _choice("respacing", OWN),
                _choice("diffusion_sampler", DEFAULTS.diffusion_sampler),
                io.Float.Input(
                    "eta",
                    default=DEFAULTS.eta,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    tooltip="For ddim: the share of noise in each step.",
                ),
                io.Float.Input(
                    "tolerance",
                    default=DEFAULTS.tolerance,
                    min=0.0,
                    max=10.0,
                    step=0.005,
                    tooltip="For seed-exact: how far apart two tokens may be to count as the same; a token's length is "
                    "about 4. 0: exactly the picture of ar, in as many passes.",
                ),
                io.Boolean.Input(
                    "measure_deviation",
                    default=DEFAULTS.measure_deviation,
                    tooltip="Runs ar as well and puts the largest distance to it into the statistics.",
                ),
                _choice("verification", DEFAULTS.verification),
                _choice("sigma_factor", DEFAULTS.sigma_factor),
                io.Float.Input(
                    "softening",
                    default=DEFAULTS.softening,
                    min=1.0,
                    max=1000.0,
                    step=1.0,
                    tooltip="For cspd: divides the distances in the acceptance ratio. The released code has 42; 1 is "
                    "the true ratio.",
                ),
                io.Float.Input(
                    "prefill_ratio",
                    default=DEFAULTS.prefill_ratio,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="For cspd: the share of the AR steps that the model makes alone at the beginning.",
                ),
            ],
            outputs=[sockets.Options.Output(display_name="options")],
        )

    @classmethod
    def validate_inputs(
        cls,
        guidance_schedule: str | None = None,
        respacing: str | None = None,
        diffusion_sampler: str | None = None,
        verification: str | None = None,
        sigma_factor: str | None = None,
    ) -> bool | str:
        given = {
            "guidance_schedule": guidance_schedule,
            "respacing": respacing,
            "diffusion_sampler": diffusion_sampler,
            "verification": verification,
            "sigma_factor": sigma_factor,
        }
        refusals = (sockets.not_listed(name, value, CHOICES[name]) for name, value in given.items())
        return next((refusal for refusal in refusals if refusal), True)

    @classmethod
    def execute(cls, **options: Any) -> io.NodeOutput:
        chosen = {name: None if value == OWN else value for name, value in options.items()}
        return io.NodeOutput(dataclasses.replace(DEFAULTS, **chosen))
