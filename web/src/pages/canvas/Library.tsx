/** The library of node types, which users drag to the canvas or add with a click or Enter. */

import { type Ref, useState } from "react"
import type { WorkerSeen, WorkflowOffer } from "@/api/schema"
import { count, Field, Status } from "@/ui"
import { words } from "@/words/en/canvas"
import type { GraphDocument, GraphNode, NodeKind } from "./document"
import { freeId, NODE_KINDS } from "./document"
import { DRAGGED } from "./Flow"

interface LibraryProps {
  offers: readonly WorkflowOffer[]
  backends: readonly WorkerSeen[]
  titleOf: (name: string) => string
  onAdd: (what: string) => void
  searchRef: Ref<HTMLInputElement>
}

const CONTROL: readonly NodeKind[] = NODE_KINDS.filter((kind) => kind !== "workflow")

interface Entry {
  what: string
  title: string
  aside: string
  hint: string
}

export function Library({ offers, backends, titleOf, onAdd, searchRef }: LibraryProps) {
  const [text, setText] = useState("")
  const query = text.trim().toLowerCase()
  const isWanted = ({ title, what }: Entry) => `${title} ${what}`.toLowerCase().includes(query)
  const ofKind = (kind: WorkflowOffer["kind"]) =>
    offers.filter((offer) => offer.kind === kind).map((offer) => entryOf(offer, titleOf))
  const control = CONTROL.map((kind) => ({
    what: kind,
    title: words.kinds[kind] ?? kind,
    aside: "",
    hint: words.kindHints[kind] ?? "",
  }))
  const groups = [
    { title: words.effects, entries: ofKind("effect").filter(isWanted) },
    { title: words.workflows, entries: ofKind("workflow").filter(isWanted) },
    { title: words.control, entries: control.filter(isWanted) },
  ].filter(({ entries }) => entries.length > 0)
  const first = groups[0]?.entries[0]
  return (
    <aside className="canvas-side canvas-library" aria-label={words.library}>
      <Field
        ref={searchRef}
        label={words.add}
        hideLabel
        icon="search"
        placeholder={words.add}
        value={text}
        after={<kbd>A</kbd>}
        onChange={(event) => setText(event.target.value)}
        onKeyDown={(event) => {
          if (event.key !== "Enter" || !first) return
          onAdd(first.what)
          setText("")
        }}
      />
      {offers.length === 0 && !query && <p className="faint">{words.noOffers}</p>}
      {groups.length === 0 && <p className="faint">{words.nothingFound}</p>}
      {groups.map(({ title, entries }) => (
        <section key={title}>
          <h2>{title}</h2>
          <ul>
            {entries.map((entry) => (
              <li key={entry.what}>
                <button
                  type="button"
                  className="canvas-entry"
                  draggable
                  title={entry.hint || words.addNamed(entry.title)}
                  onDragStart={(event) => {
                    event.dataTransfer.setData(DRAGGED, entry.what)
                    event.dataTransfer.effectAllowed = "copy"
                  }}
                  onClick={() => onAdd(entry.what)}
                >
                  <span className="cut-text">{entry.title}</span>
                  <span className="badge">{entry.aside}</span>
                </button>
              </li>
            ))}
          </ul>
        </section>
      ))}
      {backends.length > 0 && !query && <Backends backends={backends} />}
    </aside>
  )
}

const BACKENDS_MAX = 12

function Backends({ backends }: { backends: readonly WorkerSeen[] }) {
  return (
    <section>
      <h2>{words.backends}</h2>
      <ul>
        {backends.slice(0, BACKENDS_MAX).map((worker) => (
          <li key={worker.worker_id} className="canvas-backend">
            <Status status={worker.state === "pending" ? "unapproved" : worker.state}>
              {worker.worker_id}
            </Status>
            <span className="badge">{words.workerStates[worker.state] ?? worker.state}</span>
          </li>
        ))}
      </ul>
    </section>
  )
}

function entryOf(offer: WorkflowOffer, titleOf: (name: string) => string): Entry {
  const ports = offer.properties.map((property) => `${property.name}: ${property.type}`).join(", ")
  return {
    what: `${offer.kind}:${offer.name}`,
    title: offer.kind === "effect" ? titleOf(offer.name) : offer.name,
    aside: count(offer.price_tokens),
    hint: ports,
  }
}

/** Returns a new node for an item of the library. */
export function newNode(document: GraphDocument, what: string): GraphNode {
  const at = what.indexOf(":")
  if (at > 0) {
    const name = what.slice(at + 1)
    return { id: freeId(document, name), type: "workflow", [what.slice(0, at)]: name }
  }
  const kind = what as NodeKind
  const fields: Partial<Record<NodeKind, Record<string, unknown>>> = {
    input: { value_type: "image" },
    condition: { condition: "output.width > 512" },
    value: { values: { text: "" } },
    switch: { cases: [{ name: "large", when: "output.width > 512" }] },
    approve: { message: words.approveMessage },
    map: { over: "", do: { workflow: "" } },
    loop: { do: { workflow: "" }, until: "output.width > 512", at_most: 3 },
    graph: { graph: "", version: 1 },
    score: { over: "", measure: "sharpness", keep: 1 },
  }
  return { id: freeId(document, kind), type: kind, ...fields[kind] }
}
