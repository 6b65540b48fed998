"""An environment without Docker and an agent with one call, which Harbor's own interpreter imports.

The environment is bubblewrap's: a root folder of the trial's own, with the system's programs.
"""

import asyncio
import json
import os
import shutil
import tempfile
import urllib.request
from pathlib import Path

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc")


class BubblewrapEnvironment(BaseEnvironment):
    @staticmethod
    def type():
        return "bubblewrap"

    @property
    def capabilities(self):
        return EnvironmentCapabilities()

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        self.root = Path(tempfile.mkdtemp(prefix="harbor-root-"))
        for name in ("app", "tmp", "logs/agent", "logs/verifier", "logs/artifacts"):
            (self.root / name).mkdir(parents=True)

    async def stop(self, delete):
        shutil.rmtree(self.root, ignore_errors=True)

    def _inside(self, path):
        return self.root / str(path).lstrip("/")

    async def upload_file(self, source_path, target_path):
        target = self._inside(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, target)

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self._inside(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._inside(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        words = ["bwrap", "--bind", str(self.root), "/", "--dev", "/dev", "--proc", "/proc"]
        for path in filter(os.path.exists, _SYSTEM):
            words += ["--ro-bind", path, path]
        words += ["--unshare-pid", "--die-with-parent", "--chdir", cwd or "/app"]
        process = await asyncio.create_subprocess_exec(
            *words, "bash", "-c", command, env={"PATH": os.environ["PATH"], **(env or {})},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)


class OneCall(BaseAgent):
    """Asks the model once, and runs what stands in its answer after ``RUN``."""

    @staticmethod
    def name():
        return "one-call"

    def version(self):
        return "1"

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        assert "FAIL" not in instruction, "told to fail"
        body = {"model": "policy", "messages": [{"role": "user", "content": instruction}]}
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps(body).encode(),
            {
                "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
                "content-type": "application/json",
            },
        )
        answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
        said = answer["choices"][0]["message"]["content"]
        await environment.exec(said.partition("RUN ")[2] or "true")
