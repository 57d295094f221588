"""Parallel strategies, the layout of their ranks, and the placement of roles on slots. Pure arithmetic, no torch."""

from areal_mega.parallel.layout import RankCoords, RankLayout
from areal_mega.parallel.placement import Placement, place
from areal_mega.parallel.strategy import ParallelStrategy, parse

__all__ = ["ParallelStrategy", "Placement", "RankCoords", "RankLayout", "parse", "place"]
