/** What a query gives: nothing yet, an error, or data; old data stays, with a note that it may be old. */

import type { ReactNode } from "react"
import type { QueryResult } from "@/api"
import { words } from "@/words/en/common"
import { ErrorNote } from "./ErrorNote"
import { Skeleton } from "./Skeleton"

interface LoadedProps<T> {
  query: QueryResult<T>
  children: (data: T) => ReactNode
  /** In the size of what comes. */
  skeleton?: ReactNode
}

export function Loaded<T>({ query, children, skeleton }: LoadedProps<T>) {
  if (query.data !== undefined)
    return (
      <>
        {query.error && <ErrorNote error={query.error} title={words.mayBeOld} onRetry={query.reload} />}
        {children(query.data)}
      </>
    )
  if (query.error) return <ErrorNote error={query.error} onRetry={query.reload} />
  return (
    <div aria-busy="true">
      <span className="unseen">{words.loading}</span>
      {skeleton ?? <Skeleton height="96px" />}
    </div>
  )
}
