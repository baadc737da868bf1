/** What a query gives: nothing yet, an error, or data; old data stays, with a note that it may be old. */

import type { ReactNode } from "react"
import type { QueryResult } from "@/api"
import { words } from "@/words/en/common"
import { ErrorNote } from "./ErrorNote"
import { Late, Skeleton } from "./Skeleton"

interface LoadedProps<T> {
  query: QueryResult<T>
  children: (data: T) => ReactNode
  /** In the size of what comes. */
  skeleton?: ReactNode
  /** Instead of the error, where there is no such thing: trying again would not help. */
  missing?: ReactNode
}

export function Loaded<T>({ query, children, skeleton, missing }: LoadedProps<T>) {
  if (query.data !== undefined)
    return (
      <>
        {query.error && <ErrorNote error={query.error} title={words.mayBeOld} onRetry={query.reload} />}
        {children(query.data)}
      </>
    )
  if (query.error?.isMissing && missing) return missing
  if (query.error) return <ErrorNote error={query.error} onRetry={query.reload} />
  return (
    <div aria-busy="true">
      <span className="unseen">{words.loading}</span>
      {skeleton ?? <Skeleton height="96px" />}
      <Late />
    </div>
  )
}
