"""The decoders by id: which parts each is made of and what it promises. A new method is a new row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from . import initialise, redraft, verify
from .engine import Parts
from .grouping import Groups, dynamic_groups, static_groups
from .interface import DecoderOptions, Initialise, Promise, Redraft, TokenModel, Verify
from .window import Window

PROMISES: dict[Verify, Promise] = {"exact": "seed-exact", "speculative": "lossless", "grouped": "approximate"}


@dataclass(frozen=True)
class Decoder:
    """A row of the table. `promise` is what the verifier guarantees, see PROMISES."""

    id: str
    title: str
    summary: str
    verify: Verify
    redraft: Redraft = "gumbel"
    initialise: Initialise = "random"
    needs_draft_model: bool = False
    speculative: bool = True

    @property
    def promise(self) -> Promise:
        return PROMISES[self.verify] if self.speculative else "reference"

    @property
    def follows_branches(self) -> bool:
        """Whether a pass may carry runner-up branches: under equality any guess is legal."""
        return self.speculative and self.verify == "exact" and not self.needs_draft_model

    @property
    def named_parts(self) -> dict[str, str]:
        """The parts that run, for the statistics."""
        if not self.speculative:
            return {}
        own = {} if self.needs_draft_model else {"redraft": self.redraft, "initialise": self.initialise}
        return {"verify": self.verify, **own}

    def with_options(self, options: DecoderOptions) -> Decoder:
        """The same decoder with the parts that the options name; plain AR has none to exchange."""
        if not self.speculative:
            return self
        return replace(
            self,
            verify=options.verify or self.verify,
            redraft=options.redraft or self.redraft,
            initialise=options.initialise or self.initialise,
        )

    def parts(self, model: TokenModel, options: DecoderOptions) -> Parts:
        """The functions that the engine runs."""
        if self.verify == "grouped":
            accepts: Callable[[Window], Tensor] = partial(verify.grouped, groups=_groups(model, options))
        else:
            accepts = getattr(verify, self.verify) if self.speculative else verify.nothing
        return Parts(
            initialise=getattr(initialise, self.initialise.replace("-", "_")),
            redraft=getattr(redraft, self.redraft),
            accepts=accepts,
            resample=verify.resample_own if self.verify == "exact" else verify.resample_residual,
            needs_rows=self.verify != "exact" or self.redraft == "maximal" or self.initialise == "neighbour",
            remembered=initialise.REMEMBERED.get(self.initialise, "nothing"),
        )


def _groups(model: TokenModel, options: DecoderOptions) -> Groups:
    embeddings = model.code_embeddings().to(model.device)
    if options.grouping == "static":
        return static_groups(embeddings, options.group_size)
    return dynamic_groups(embeddings, options.group_size, options.group_probability_gap, options.group_distance)


AUTO = "auto"
AUTO_DECODER = "seed-exact"

DECODERS: dict[str, Decoder] = {
    decoder.id: decoder
    for decoder in (
        Decoder(
            "ar",
            "Autoregressive",
            "One position a forward pass: the reference.",
            verify="exact",
            speculative=False,
        ),
        Decoder(
            "seed-exact",
            "Seed-exact",
            "One noise per position drives drafting and verification: the same picture as ar for the same seed.",
            verify="exact",
        ),
        Decoder(
            "scd-gumbel",
            "Speculative Coupled Decoding, Gumbel",
            "Drafts share one Gumbel noise per position; the ratio test keeps the model's distribution.",
            verify="speculative",
        ),
        Decoder(
            "scd-maximal",
            "Speculative Coupled Decoding, maximal",
            "Drafts are kept by maximal coupling; the ratio test keeps the model's distribution.",
            verify="speculative",
            redraft="maximal",
        ),
        Decoder(
            "sjd",
            "Speculative Jacobi Decoding",
            "Independent redrafts and the ratio test.",
            verify="speculative",
            redraft="independent",
        ),
        Decoder(
            "gsd",
            "Grouped Speculative Decoding",
            "Accepts by the mass of groups of similar codes: fewer passes, an approximate distribution.",
            verify="grouped",
            redraft="independent",
        ),
        Decoder(
            "draft-model",
            "Draft model",
            "A smaller model drafts, the ratio test keeps the model's distribution.",
            verify="speculative",
            needs_draft_model=True,
        ),
    )
}
