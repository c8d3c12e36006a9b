"""The README's quick start by a person who has the installed wheel and nothing else: no compiler, no repository.

    cd EMPTY-FOLDER; python .ci/quick_start.py README.md

Runs the commands of "Try it" and the Python of "A short tour" as they stand there. Lines that install are left out (the
wheel is installed), and trainings after the first are kept to 20 steps.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = str(Path(sys.executable).parent)  # nothing but this environment's programs is on PATH
COMPILERS = ("cc", "gcc", "clang", "c++", "g++")


def section(text, title):
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ")[0]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(readme):
    lines = "".join(blocks(section(readme, "Try it"), "sh")).splitlines()
    parts = [part.strip() for line in lines for part in line.split(" #")[0].split("&&")]
    found = [part for part in parts if part.startswith("cmha ")]
    return [line + " --steps 20" if i and line.startswith("cmha train") else line for i, line in enumerate(found)]


def run(command):
    print("$", command, flush=True)
    environment = {"PATH": TOOLS, "HOME": os.getcwd(), "LANG": "C.UTF-8"}
    subprocess.run([shutil.which("bash"), "-c", command], env=environment, check=True)


def main(path):
    readme = Path(path).read_text(encoding="utf-8")
    if os.listdir("."):
        sys.exit("the folder is not empty")
    if compiler := next((name for name in COMPILERS if shutil.which(name, path=TOOLS)), None):
        sys.exit(f"{compiler} lies in the environment: nothing would be proven")
    for name in ("a.txt", "b.txt"):  # "your own text"
        Path(name).write_text(readme, encoding="utf-8")
    Path("tour.py").write_text("\n".join(blocks(section(readme, "A short tour"), "python")), encoding="utf-8")
    for line in [*commands(readme), "python -W error tour.py"]:
        run(line)


if __name__ == "__main__":
    main(sys.argv[1])
