"""The names of TPUs: those of gcloud, of machine types and of topologies, as ``odriver plan`` takes them."""

import importlib.util

import pytest

from engine.errors import ConfigurationError
from engine.planner.topology import NAMES, chips_of, topology_of


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("v5e:1x1", "v5e:1x1"),
        ("v5e:2x4", "v5e:2x4"),
        ("v5litepod:4x4", "v5e:4x4"),
        ("v6e-1", "v6e:1x1"),
        ("V6E-256", "v6e:16x16"),
        ("v5litepod-8", "v5e:2x4"),
        ("v5e-4", "v5e:2x2"),
        ("v4-8", "v4:2x2x1"),
        ("v4-32", "v4:2x2x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-12288", "v5p:16x16x24"),
        ("ct6e-standard-8t", "v6e:2x4"),
        ("ct6e-standard-1t", "v6e:1x1"),
        ("ct5lp-hightpu-4t", "v5e:2x2"),
        ("ct5l-hightpu-8t", "v5e:2x4"),
        ("ct5p-hightpu-1t", "v5p:1x1x1"),
        ("ct5p-hightpu-4t", "v5p:2x2x1"),
        ("ct4p-hightpu-4t", "v4:2x2x1"),
        (" v6e:2x2 ", "v6e:2x2"),
    ],
)
def test_a_tpu_is_known_by_every_name_that_it_has(name, topology):
    """An accelerator type, a machine type, or its topology. Types of v4 and v5p count cores, of which a chip has two."""
    assert topology_of(name) == topology


@pytest.mark.parametrize(
    ("name", "similar"),
    [("v5litepod-7", "v5litepod-8"), ("v6-8", "v6e-8"), ("ct6e-standard-16t", "ct6e-standard-1t"), ("v5p-9", "v5p-8")],
)
def test_a_name_that_no_tpu_has_is_refused_with_those_most_like_it(name, similar):
    """And with the three forms that a name has."""
    with pytest.raises(ConfigurationError) as refused:
        topology_of(name)

    assert f"no TPU is called {name!r} (did you mean one of " in str(refused.value)
    assert similar in str(refused.value).partition(")")[0].replace(",", "").split()
    assert "such as v6e-1, v5litepod-8 or v5p-8, a machine type such as ct6e-standard-8t, or" in str(refused.value)


@pytest.mark.parametrize(
    "name", ["tpu7x-8", "TPU7x", "TPU v7x", "tpu7x:2x2x1", "tpu7x-standard-4t", "v7x-8", "ironwood"]
)
def test_a_tpu_whose_chip_is_two_devices_is_refused_by_name(name):
    """With the reason, and not as a name that no TPU has."""
    with pytest.raises(
        ConfigurationError, match=r"is a TPU7x \(Ironwood\), which is not planned for.*known are v4, v5e"
    ):
        topology_of(name)


@pytest.mark.parametrize("name", ["", "2x4", "a100", "v5e:", "v5e:2", "v5e:2x4x1x1", "v5e:2y4", "v9:2x2", "--help"])
def test_what_is_no_name_at_all_is_refused_in_words(name):
    """Nothing of it reaches the compiler."""
    with pytest.raises(ConfigurationError, match="no TPU is called"):
        topology_of(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5e:32x32", "v5e:32x32 would be 1,024 chips: a slice of v5e has 1 to 256"),
        ("v6e:0x1", "v6e:0x1 would be 0 chips"),
        ("v5p:1000x1000x1000", "v5p:1000x1000x1000 would be 1,000,000,000 chips: a slice of v5p has 1 to 6,144"),
        ("v4:16x16x24", "v4:16x16x24 would be 6,144 chips: a slice of v4 has 1 to 4,096"),
        ("v4-12288", "no TPU is called 'v4-12288'"),
    ],
)
def test_a_slice_that_is_larger_than_any_is_refused(name, words):
    """Before libtpu, which plans for some of them and ends the process at others."""
    with pytest.raises(ConfigurationError, match=words):
        topology_of(name)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_compiler_knows_every_machine_and_its_chips():
    """Those of one host, and one chip; a chip is one device, of two cores in a v4 and v5p."""
    machines = {name: topology for name, topology in NAMES.items() if name.startswith("ct")}

    devices = {name: chips_of(topology) for name, topology in machines.items()}

    assert {name: len(found) for name, found in devices.items()} == {
        name: int(name.rpartition("-")[2].rstrip("t")) for name in machines
    }
    assert {found[0].device_kind for found in devices.values()} == {"TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite"}
