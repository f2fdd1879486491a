"""A ray tracer for spheres on a checkered floor, in numpy: all rays of a tile at once, with shadows and mirrors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]  # vectors are rows: shape (rays, 3)

_SUN = np.array([0.5, 0.8, -0.33])
_SKY, _HORIZON = np.array([0.35, 0.55, 0.85]), np.array([0.9, 0.93, 0.97])
_LIGHT, _DARK = np.array([0.85, 0.83, 0.78]), np.array([0.25, 0.28, 0.33])
_MIRROR = 0.35  # the part of the light that a sphere reflects
_BOUNCES = 3
_NEAR = 1e-4


def spheres(turn: float) -> list[tuple[Floats, float, Floats]]:
    """Return center, radius and color: one in the middle, and six that circle it. `turn` is from 0 to 1."""
    ring = [
        (
            np.array([2.1 * np.cos(angle), 0.5, 2.1 * np.sin(angle)]),
            0.5,
            0.5 + 0.45 * np.cos(angle - 2 * np.pi * turn + np.array([0.0, 2.1, 4.2])),
        )
        for angle in 2 * np.pi * (turn + np.arange(6) / 6)
    ]
    return [(np.array([0.0, 1.0, 0.0]), 1.0, np.array([0.9, 0.9, 0.95])), *ring]


def render(turn: float, width: int, height: int, first: int, rows: int) -> NDArray[np.uint8]:
    """Render `rows` rows of a picture from row `first` on, four rays per pixel."""
    y, x = np.mgrid[first : first + rows : 0.5, 0:width:0.5]
    rays = np.stack([(x - width / 2) / height, (height / 2 - y) / height - 0.12, np.full(x.shape, 1.25)], -1)
    eye = np.broadcast_to([0.0, 1.9, -5.5], (x.size, 3))
    light = _light(spheres(turn), eye, _unit(rays.reshape(-1, 3)), _BOUNCES)
    pixels = light.reshape(rows, 2, width, 2, 3).mean((1, 3))
    picture: NDArray[np.uint8] = (255 * pixels.clip(0, 1) ** (1 / 2.2)).astype(np.uint8)
    return picture


def _light(scene: list[tuple[Floats, float, Floats]], eye: Floats, rays: Floats, bounces: int) -> Floats:
    """Return the light that comes to `eye` from the direction of each ray."""
    distance, sphere = _nearest(scene, eye, rays)
    floor = np.where(rays[:, 1] < -_NEAR, -eye[:, 1] / np.minimum(rays[:, 1], -_NEAR), np.inf)
    is_floor = floor < distance
    light: Floats = _HORIZON + (_SKY - _HORIZON) * rays[:, 1:2].clip(0, 1) ** 0.5
    hit = np.flatnonzero(np.isfinite(np.minimum(distance, floor)))
    if not len(hit):
        return light

    is_floor, sphere, rays = is_floor[hit], sphere[hit], rays[hit]
    point = eye[hit] + rays * np.minimum(distance, floor)[hit, None]
    center, radius, color = (np.array(part) for part in zip(*scene, strict=True))
    normal = np.where(is_floor[:, None], [0.0, 1.0, 0.0], (point - center[sphere]) / radius[sphere, None])
    checker = (np.floor(point[:, 0]) + np.floor(point[:, 2])) % 2
    own = np.where(is_floor[:, None], np.where(checker[:, None] > 0, _LIGHT, _DARK), color[sphere])
    above = point + _NEAR * normal
    is_lit = ~np.isfinite(_nearest(scene, above, np.broadcast_to(_unit(_SUN), point.shape))[0])
    shade = 0.25 + 0.75 * is_lit * (normal @ _unit(_SUN)).clip(0)
    seen = own**2.2 * shade[:, None]
    if bounces:
        shiny = np.flatnonzero(~is_floor)
        mirrored = rays - 2 * (rays * normal).sum(1, keepdims=True) * normal
        reflected = _light(scene, above[shiny], mirrored[shiny], bounces - 1)
        seen[shiny] = (1 - _MIRROR) * seen[shiny] + _MIRROR * reflected
    fog = np.exp(-0.02 * np.minimum(distance, floor)[hit, None])
    light[hit] = fog * seen + (1 - fog) * _HORIZON
    return light


def _nearest(scene: list[tuple[Floats, float, Floats]], eye: Floats, rays: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """Return the distance to the first sphere on each ray, infinite if there is none, and its number."""
    distances = []
    for center, radius, _ in scene:
        offset = center - eye
        along = (offset * rays).sum(1)
        inside = radius**2 - (offset**2).sum(1) + along**2
        distance = along - np.sqrt(inside.clip(0))
        distances.append(np.where((inside > 0) & (distance > _NEAR), distance, np.inf))
    return np.min(distances, 0), np.argmin(distances, 0)


def _unit(vectors: Floats) -> Floats:
    unit: Floats = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return unit
