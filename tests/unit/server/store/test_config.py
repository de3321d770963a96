"""The first split keys: hex, sorted, each once."""

import pytest

from server.config import ConfigError
from server.store.config import StoreConfig


def test_a_new_cluster_has_one_region_unless_keys_are_given() -> None:
    assert StoreConfig().first_split_keys() == []


def test_keys_are_sorted_each_once_and_empty_ones_dropped() -> None:
    assert StoreConfig(split_keys="62, 61,,62").first_split_keys() == [b"a", b"b"]
    assert StoreConfig(split_keys="").first_split_keys() == []


def test_what_is_not_hex_is_named() -> None:
    with pytest.raises(ConfigError, match="--split-keys"):
        StoreConfig(split_keys="xyz").first_split_keys()


def test_a_share_of_more_than_all_the_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="--destroy-range-share is a share of the time"):
        StoreConfig(destroy_range_share=1.5)
