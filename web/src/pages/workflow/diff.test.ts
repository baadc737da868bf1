import { expect, test } from "vitest"
import type { WorkflowDiff } from "@/api/schema"
import { words } from "@/words/en/workflows"
import { changesOf, isSame, linesOf } from "./diff"

const SAME: WorkflowDiff = {
  nodes_added: [],
  nodes_removed: [],
  links_added: 0,
  links_removed: 0,
  values_changed: [],
  files_added: [],
  files_removed: [],
  properties_added: [],
  properties_removed: [],
  properties_changed: [],
}

test("equal versions are described as equal", () => {
  expect(isSame(SAME)).toBe(true)
  expect(isSame({ ...SAME, links_removed: 1 })).toBe(false)
})

test("nodes are marked as new or changed, and inner nodes on the node that contains them", () => {
  const changes = changesOf({
    ...SAME,
    nodes_added: [{ id: "9", type: "ImageBlur", title: "ImageBlur" }],
    values_changed: [
      { address: "2:20.resize_type.longer_size", title: "Blur", before: 1, after: 2 },
      { address: "9.sigma", title: "ImageBlur", before: 1, after: 2 },
    ],
  })
  expect([...changes]).toEqual([
    ["2", "changed"],
    ["9", "added"],
  ])
})

test("only differences are listed", () => {
  const lines = linesOf({
    ...SAME,
    nodes_removed: [{ id: "3", type: "SaveImage", title: "Keep" }],
    links_added: 2,
    properties_changed: ["size"],
  })
  expect(lines).toEqual([
    { title: words.diff.nodesRemoved, sign: "−", names: ["Keep (SaveImage) 3"] },
    { title: words.diff.propertiesChanged, sign: "", names: ["size"] },
    { title: words.diff.links, sign: "", names: [words.wires(2, 0)] },
  ])
})
