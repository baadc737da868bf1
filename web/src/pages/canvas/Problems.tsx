/** Lists the graph's problems. Each entry leads to its node. */

import { useState } from "react"
import type { ProblemSeen, Verdict } from "@/api/schema"
import { Button, Icon, StateIcon } from "@/ui"
import { words } from "@/words/en/canvas"

export function Problems({ verdict, onShow }: { verdict: Verdict; onShow: (node: string) => void }) {
  const { problems, warnings } = verdict
  const shown = problems.length > 0 ? problems : warnings
  const [at, setAt] = useState(0)
  const one = shown[at % Math.max(1, shown.length)]
  if (!one)
    return (
      <div className="canvas-problems" role="status">
        <StateIcon state="succeeded" />
        <span>{words.fine}</span>
      </div>
    )
  return (
    <div className="canvas-problems" role="status">
      {problems.length > 0 ? <StateIcon state="failed" /> : <Icon name="warning" />}
      <span className="canvas-problem">
        {problems.length > 0 ? words.problems(problems.length) : words.warnings(warnings.length)}
        {": "}
        <b>{placeOf(one)}</b> {one.message}
      </span>
      {one.node && (
        <Button size="small" onClick={() => onShow(one.node)}>
          {words.show}
        </Button>
      )}
      {shown.length > 1 && (
        <Button size="small" kind="ghost" icon="right" label={words.next} onClick={() => setAt(at + 1)} />
      )}
    </div>
  )
}

function placeOf({ node, port }: ProblemSeen): string {
  return port ? `${node}.${port}` : node
}
