/** A table of a user's keys, used by the pages for customers and for operators. */

import { useState } from "react"
import { Badge, Button, Time } from "@/ui"
import { type ListColumn, ListTable } from "@/ui/ListTable"
import { words } from "@/words/en/keys"
import { type ShownKey, scopesOf } from "./NewKey"

export function isOver(key: ShownKey): boolean {
  return key.revoked_at !== null || (key.expires_at !== null && Date.parse(key.expires_at) < Date.now())
}

interface KeyTableProps<Key> {
  keys: readonly Key[]
  /** The id of the key that this browser used to sign in. */
  here?: string | undefined
  onRotate?: (key: Key) => void
  onRevoke: (key: Key) => void
  /** Explains why keys can't be revoked now. */
  offReason?: string | null
}

export function KeyTable<Key extends ShownKey>({
  keys,
  here,
  onRotate,
  onRevoke,
  offReason,
}: KeyTableProps<Key>) {
  const [showsOld, setShowsOld] = useState(false)
  const old = keys.filter(isOver)
  const listed = showsOld ? keys : keys.filter((key) => !isOver(key))
  const acts = (key: Key) => {
    if (isOver(key)) return <span className="faint">{key.revoked_at ? words.revoked : words.ended}</span>
    return (
      <>
        {onRotate && (
          <Button kind="ghost" size="small" aria-description={key.name} onClick={() => onRotate(key)}>
            {words.rotate}
          </Button>
        )}
        <Button
          kind="ghost"
          size="small"
          className="is-danger"
          aria-description={key.name}
          offReason={offReason}
          onClick={() => onRevoke(key)}
        >
          {words.revoke}
        </Button>
      </>
    )
  }
  return (
    <>
      {listed.length > 0 && (
        <div className="panel">
          <ListTable
            label={words.title}
            columns={columnsOf(here, acts)}
            rows={listed}
            rowKey={(key) => key.id}
            isOver={isOver}
          />
        </div>
      )}
      {old.length > 0 && (
        <Button kind="ghost" size="small" onClick={() => setShowsOld(!showsOld)}>
          {showsOld ? words.hideOld : words.showOld(old.length)}
        </Button>
      )}
    </>
  )
}

function columnsOf<Key extends ShownKey>(
  here: string | undefined,
  acts: (key: Key) => React.ReactNode,
): ListColumn<Key>[] {
  const { columns } = words
  return [
    {
      key: "name",
      title: columns.name,
      head: true,
      cell: (key) => (
        <>
          {key.name} {key.id === here && <Badge>{words.here}</Badge>}
        </>
      ),
    },
    { key: "key", title: columns.key, cell: (key) => <span className="mono">{key.prefix}…</span> },
    { key: "may", title: columns.may, cell: scopesOf },
    { key: "made", title: columns.made, cell: (key) => <Time at={key.created_at} /> },
    {
      key: "used",
      title: columns.used,
      cell: (key) => (key.last_used_at ? <Time at={key.last_used_at} /> : words.neverUsed),
    },
    {
      key: "ends",
      title: columns.ends,
      cell: (key) => (key.expires_at ? <Time at={key.expires_at} /> : words.never),
    },
    { key: "acts", title: columns.acts, acts: true, cell: acts },
  ]
}
