/** Shows JSON as a tree that opens level by level. Long lists are shown in parts. */

import { useState } from "react"
import { words } from "@/words/en/common"
import { CopyButton } from "./CopyId"

const ENTRIES_PER_PART = 100
const TEXT_CHARACTERS_MAX = 2_000

export function JsonTree({ value, openLevels = 1 }: { value: unknown; openLevels?: number }) {
  return (
    <div className="json">
      <CopyButton text={JSON.stringify(value, null, 2) ?? ""} size="small" kind="ghost" />
      <Value value={value} openLevels={openLevels} />
    </div>
  )
}

function Value({ value, openLevels }: { value: unknown; openLevels: number }) {
  if (Array.isArray(value))
    return (
      <Branch entries={value.map((item, index) => [String(index), item])} kind="[]" openLevels={openLevels} />
    )
  if (value !== null && typeof value === "object")
    return <Branch entries={Object.entries(value)} kind="{}" openLevels={openLevels} />
  return <Leaf value={value} />
}

function Leaf({ value }: { value: unknown }) {
  const [isWhole, setWhole] = useState(false)
  const text = JSON.stringify(value) ?? "undefined"
  const isCut = !isWhole && text.length > TEXT_CHARACTERS_MAX
  return (
    <span className={`json-leaf json-${value === null ? "null" : typeof value}`}>
      {isCut ? `${text.slice(0, TEXT_CHARACTERS_MAX)}…` : text}
      {isCut && (
        <button type="button" className="link" onClick={() => setWhole(true)}>
          {words.showAll}
        </button>
      )}
    </span>
  )
}

interface BranchProps {
  entries: readonly [string, unknown][]
  kind: "[]" | "{}"
  openLevels: number
}

function Branch({ entries, kind, openLevels }: BranchProps) {
  const [isOpen, setOpen] = useState(openLevels > 0)
  const [shown, setShown] = useState(ENTRIES_PER_PART)
  if (entries.length === 0) return <span className="json-leaf">{kind}</span>
  return (
    <details className="json-branch" open={isOpen} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        {kind[0]} <span className="json-count">{entries.length}</span> {kind[1]}
      </summary>
      {isOpen && (
        <ul>
          {entries.slice(0, shown).map(([name, value]) => (
            <li key={name}>
              <span className="json-key">{name}: </span>
              <Value value={value} openLevels={openLevels - 1} />
            </li>
          ))}
          {entries.length > shown && (
            <li>
              <button type="button" className="link" onClick={() => setShown(shown + ENTRIES_PER_PART)}>
                {words.showMore(entries.length - shown)}
              </button>
            </li>
          )}
        </ul>
      )}
    </details>
  )
}
