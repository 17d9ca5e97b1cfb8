import subprocess
import sys
from importlib.util import find_spec

import pytest

from siirl_dask.models.broken_imports import hide_broken


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A module that fails halfway, without ImportError, like a wheel built for another torch;
    and one that works.
    """
    (tmp_path / "broken_one").mkdir()
    (tmp_path / "broken_one" / "__init__.py").write_text(
        "import broken_one.part\nraise OSError('no libcudart')"
    )
    (tmp_path / "broken_one" / "part.py").write_text("")
    (tmp_path / "sound_one.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("broken_one", "broken_one.part", "sound_one"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("modules")
def test_modules_that_fail_to_import_count_as_absent():
    assert hide_broken(["broken_one", "sound_one", "never_installed"]) == ["broken_one"]
    assert find_spec("broken_one") is None
    with pytest.raises(ModuleNotFoundError):
        import broken_one  # noqa: F401
    assert not [name for name in sys.modules if name.startswith("broken_one.")]
    assert "sound_one" in sys.modules
    assert "never_installed" not in sys.modules


def install_broken(folder, name):
    """A package that raises at its import, as one that was built for another torch does."""
    (folder / f"{name}.py").write_text("raise RuntimeError('operator does not exist')")
    metadata = folder / f"{name}-0.28.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.28.0\n")


def test_transformers_loads_beside_a_broken_torchvision(tmp_path):
    name = "torchvision"
    install_broken(tmp_path, name)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from siirl_dask.models.broken_imports import hide; hide()\n"
        f"assert {name!r} not in sys.modules\n"
        "from transformers import Qwen3ForCausalLM; print(Qwen3ForCausalLM.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "Qwen3ForCausalLM\n", done.stderr


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_a_script_that_imports_transformers_first_trains_beside_a_broken_package(tmp_path, name):
    install_broken(tmp_path, name)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import transformers\n"
        f"assert transformers.utils.is_{name}_available()\n"
        "from siirl_dask.models.broken_imports import hide; hide(); hide()\n"
        f"assert not transformers.utils.is_{name}_available()\n"
        "from transformers import Qwen3ForCausalLM; print(Qwen3ForCausalLM.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "Qwen3ForCausalLM\n", done.stderr


def test_importing_siirl_dask_leaves_meta_path_alone():
    code = (
        "import sys; before = list(sys.meta_path); import siirl_dask; assert sys.meta_path == "
        "before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
