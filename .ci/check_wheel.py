"""What must hold of every wheel before it is used or published: python .ci/check_wheel.py FOLDER

Small, no sources, its types and licence inside, three requirements, no library of others inside and none needed but the
system's own. The last is read with pyelftools where the wheel is for Linux.
"""

import sys
import zipfile
from email.parser import Parser
from io import BytesIO
from pathlib import Path

LIMIT = 1.5e6  # bytes
SYSTEM = ("libc.so.", "libm.so.", "libpthread.so.", "ld-linux", "libc.musl-")  # OpenMP's library is not among them
SOURCES = (".c", ".h", ".pyx", ".pxi", ".o")


def needed_libraries(core):
    """The names under DT_NEEDED of an ELF file."""
    from elftools.elf.elffile import ELFFile

    dynamic = ELFFile(BytesIO(core)).get_section_by_name(".dynamic")
    return [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]


def check(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        files = {name: archive.read(name) for name in names if name.endswith((".so", "/METADATA"))}
    metadata = Parser().parsestr(next(text for name, text in files.items() if name.endswith("/METADATA")).decode())
    requires = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    requires = sorted(line.split(";")[0].split(">")[0].split("=")[0].strip() for line in requires)
    cores = [name for name in names if name.startswith("cmha/_core.") and name.endswith((".so", ".pyd"))]
    folders = {name.split("/")[0] for name in names}
    size = wheel.stat().st_size

    assert size < LIMIT, f"{size} bytes, the limit is {LIMIT:.0f}"
    assert requires == ["numpy", "safetensors", "tqdm"], f"a plain install needs {requires}"
    assert len(cores) == 1, f"compiled modules: {cores}"
    assert "cmha/py.typed" in names and "cmha/_core.pyi" in names, "the types are missing"
    assert any(".dist-info/licenses/LICENSE" in name for name in names), "the licence is missing"
    assert not [name for name in names if name.endswith(SOURCES)], "sources of the core in the wheel"
    if "-win_" not in wheel.name:  # Windows: Microsoft's vcomp140.dll comes along
        assert folders == {"cmha", f"cmha-{metadata['Version']}.dist-info"}, f"more than the package: {sorted(folders)}"
    needs = needed_libraries(files[cores[0]]) if "linux" in wheel.name else []
    strangers = [library for library in needs if not library.startswith(SYSTEM)]
    assert not strangers, f"libraries that are not the system's: {strangers}"
    print(f"{wheel.name}: {size / 1e6:.2f} MB, {len(names)} files, requires {', '.join(requires)}"
          + (f", links {', '.join(needs)}" if needs else ""))  # fmt: skip


if __name__ == "__main__":
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    for path in wheels:
        try:
            check(path)
        except AssertionError as error:
            sys.exit(f"{path.name}: {error}")
    if not wheels:
        sys.exit(f"no wheel in {sys.argv[1]}")
