/** Shows a query's state: loading, an error or data. Old data remains visible, with a note that
 * it may be outdated. */

import type { ReactNode } from "react"
import type { QueryResult } from "@/api"
import { words } from "@/words/en/common"
import { ErrorNote } from "./ErrorNote"
import { Late, Skeleton } from "./Skeleton"

interface LoadedProps<T> {
  query: QueryResult<T>
  children: (data: T) => ReactNode
  /** A placeholder of the content's size. */
  skeleton?: ReactNode
  /** Replaces the error if the item doesn't exist, because a retry would not help. */
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
