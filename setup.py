"""Packages only: conf/ travels inside the wheel as core/_conf, and new folders need no list to be kept."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["core*", "plugins*"]), "core._conf"], package_dir={"core._conf": "conf"})
