"""ZEN: one decision table with the hit policy "collect", over the rules and inputs that decisions.py writes.

python zen_engine.py FILE LOOPS      prints {"matched": [...], "plain": [...], "traced": [...]}, times in seconds
"""

import json
import sys
import time
from pathlib import Path

import zen

COLUMNS = ("amount", "currency", "country", "count")


def table(rules):
    """The same rules as one decision table; each says its number."""
    inputs = [{"id": name, "name": name, "type": "expression", "field": name} for name in COLUMNS]
    lines = [
        {
            "_id": f"r{number}",
            "amount": f"> {rule['amount']}",
            "currency": ", ".join(f'"{code}"' for code in rule["currencies"]),
            "country": f"not in {json.dumps(rule['countries'])}",
            "count": f">= {rule['count']}",
            "out": str(number),
        }
        for number, rule in enumerate(rules)
    ]
    outputs = [{"id": "out", "name": "rule", "type": "expression", "field": "rule"}]
    content = {"hitPolicy": "collect", "inputs": inputs, "outputs": outputs, "rules": lines}
    nodes = [
        {"id": "in", "name": "in", "type": "inputNode", "position": {"x": 0, "y": 0}},
        {"id": "t", "name": "t", "type": "decisionTableNode", "position": {"x": 0, "y": 0}, "content": content},
        {"id": "end", "name": "end", "type": "outputNode", "position": {"x": 0, "y": 0}},
    ]
    edges = [
        {"id": "a", "sourceId": "in", "targetId": "t", "type": "edge"},
        {"id": "b", "sourceId": "t", "targetId": "end", "type": "edge"},
    ]
    return json.dumps({"nodes": nodes, "edges": edges})


def main():
    """Evaluate each input once for the answers, then again and again for the times."""
    given = json.loads(Path(sys.argv[1]).read_text())
    loops = int(sys.argv[2])
    decision = zen.ZenEngine().create_decision(table(given["rules"]))
    contexts = [{**one, "amount": float(one["amount"])} for one in given["contexts"]]  # it has no decimals of text
    matched = [[line["rule"] for line in decision.evaluate(one)["result"]] for one in contexts]
    found = {"matched": matched}
    for name, options in (("plain", {}), ("traced", {"trace": True})):
        times = []
        for turn in range(loops):
            context = contexts[turn % len(contexts)]
            began = time.perf_counter()
            decision.evaluate(context, options)
            times.append(time.perf_counter() - began)
        found[name] = times
    print(json.dumps(found))


main()
