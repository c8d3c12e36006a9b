"""The wheels that [tool.cibuildwheel] builds are the ones that are meant: asks cibuildwheel itself."""

import subprocess
import sys

SYSTEMS = {  # platform -> (architectures, how its identifiers end)
    "linux": ("x86_64,aarch64", [f"{libc}_{machine}" for libc in ("manylinux", "musllinux")
                                 for machine in ("x86_64", "aarch64")]),
    "macos": ("arm64,x86_64", ["macosx_arm64", "macosx_x86_64"]),
    "windows": ("AMD64,ARM64", ["win_amd64", "win_arm64"]),
}  # fmt: skip
PYTHONS = ["cp311", "cp312", "cp313", "cp314", "cp314t", "cp315", "cp315t"]

for platform, (archs, ends) in SYSTEMS.items():
    ask = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", platform, "--archs", archs]
    listed = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.split()
    meant = [f"{python}-{end}" for end in ends for python in PYTHONS]
    missing, extra = sorted(set(meant) - set(listed)), sorted(set(listed) - set(meant))
    if missing or extra:
        sys.exit(f"{platform}: cibuildwheel does not list {missing}, and lists {extra}, which nobody asked for")
    print(f"{platform}: {len(listed)} wheels, {', '.join(PYTHONS)} for {', '.join(ends)}")
