"""Fixtures of all tests."""

from tests.plugins_fixtures import site as site
