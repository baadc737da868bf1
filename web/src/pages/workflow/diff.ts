/** Describes the differences between two versions. Pure functions. */

import type { WorkflowDiff } from "@/api/schema"
import type { Change } from "@/pages/workflows/Drawing"
import { words } from "@/words/en/workflows"

export interface Line {
  title: string
  sign: "+" | "−" | ""
  names: readonly string[]
}

/** Returns the nodes of the later version that are new or have other values. */
export function changesOf(diff: WorkflowDiff): Map<string, Change> {
  const changes = new Map<string, Change>()
  for (const change of diff.values_changed) {
    // Inner nodes appear as the node that contains them.
    const node = change.address.split(".")[0]?.split(":")[0]
    if (node) changes.set(node, "changed")
  }
  for (const node of diff.nodes_added) changes.set(node.id, "added")
  return changes
}

export function linesOf(diff: WorkflowDiff): Line[] {
  const named = (all: WorkflowDiff["nodes_added"]) =>
    all.map((node) =>
      node.title === node.type ? `${node.title} ${node.id}` : `${node.title} (${node.type}) ${node.id}`,
    )
  const { links_added, links_removed } = diff
  const lines: Line[] = [
    { title: words.diff.nodesAdded, sign: "+", names: named(diff.nodes_added) },
    { title: words.diff.nodesRemoved, sign: "−", names: named(diff.nodes_removed) },
    { title: words.diff.propertiesAdded, sign: "+", names: diff.properties_added },
    { title: words.diff.propertiesRemoved, sign: "−", names: diff.properties_removed },
    { title: words.diff.propertiesChanged, sign: "", names: diff.properties_changed },
    { title: words.diff.filesAdded, sign: "+", names: diff.files_added },
    { title: words.diff.filesRemoved, sign: "−", names: diff.files_removed },
    {
      title: words.diff.links,
      sign: "",
      names: links_added + links_removed > 0 ? [words.wires(links_added, links_removed)] : [],
    },
  ]
  return lines.filter((line) => line.names.length > 0)
}

export function isSame(diff: WorkflowDiff): boolean {
  return diff.values_changed.length === 0 && linesOf(diff).length === 0
}
