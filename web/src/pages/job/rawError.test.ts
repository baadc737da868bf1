import { expect, test } from "vitest"
import { readError } from "./rawError"

test("a backend's exception shows its type, its message and its node", () => {
  const raw = JSON.stringify({
    code: "run_failed",
    exception_type: "torch.OutOfMemoryError",
    exception_message: "CUDA out of memory ",
    node_id: "31",
    node_type: "KSampler",
    traceback: ["  File a, line 1\n", "  File b, line 2\n"],
  })
  const read = readError(raw)
  expect(read).toMatchObject({
    title: "torch.OutOfMemoryError: CUDA out of memory",
    nodeId: "31",
    nodeType: "KSampler",
  })
  expect(read.text.split("\n")).toContain("  File b, line 2")
  expect(read.text).toContain("code: run_failed")
})

test("any other error is shown unchanged", () => {
  for (const raw of ["the worker went away", "[1]", "{broken", "null"])
    expect(readError(raw)).toEqual({ title: null, nodeId: null, nodeType: null, text: raw })
})
