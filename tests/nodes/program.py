"""An agent that is a program: reads its row, asks, and prints the reward."""

import json
import os
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

row = json.load(sys.stdin)
match row["prompt"]:
    case "dies":
        sys.exit("out of tools")
    case "hangs":
        Path(row["answer"]).write_text(str(os.getpid()))
        time.sleep(3600)
    case "talks too much":
        print("x" * 10_000_000)
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "prompt": row["prompt"]}).encode()
headers = {
    "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    "Content-Type": "application/json",
}
with urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, headers)) as answer:
    text = json.load(answer)["choices"][0]["text"]
print("a line for people")
print(json.dumps({"reward": float(len(text)), "program": 1.0}))
