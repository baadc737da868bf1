/** Parts that the settings panels of all node types share. */

import type { ProblemSeen, WorkerSeen, WorkflowOffer } from "@/api/schema"
import { Field } from "@/ui"
import { type GraphDocument, type GraphNode, setFields } from "./document"
import type { GraphTypes, InnerOf } from "./types"

export interface NodePanelProps {
  document: GraphDocument
  node: GraphNode
  types: GraphTypes
  offer: WorkflowOffer | undefined
  offers: readonly WorkflowOffer[]
  innerOf: InnerOf
  backends: readonly WorkerSeen[]
  problems: readonly ProblemSeen[]
  onChange: (document: GraphDocument, tag: string | null) => void
  onRename: (document: GraphDocument, before: string, after: string) => void
  onClose: () => void
  onDelete: () => void
  onDuplicate: () => void
}

/** Changes a field. All letters typed in one field form one undo step. */
export function useSet({ document, node, onChange }: NodePanelProps) {
  return (fields: Record<string, unknown>) =>
    onChange(setFields(document, node.id, fields), `${node.id}.${Object.keys(fields).join()}`)
}

/** Returns the message of the first problem at one of these ports. */
export function wrongAt({ problems }: NodePanelProps, ...ports: string[]): string | undefined {
  return problems.find((problem) => ports.includes(problem.port))?.message
}

interface NumberFieldProps extends NodePanelProps {
  field: string
  label: string
  preset?: number
  least: number
}

export function NumberField({ field, label, preset, least, ...props }: NumberFieldProps) {
  const set = useSet(props)
  const value = props.node[field] ?? preset
  return (
    <Field
      label={label}
      type="number"
      min={least}
      step={1}
      value={value === undefined ? "" : String(value)}
      error={props.problems.find((problem) => problem.port === field)?.message}
      onChange={(event) => {
        const typed = event.target.value === "" ? undefined : Number(event.target.value)
        set({ [field]: typed === preset ? undefined : typed })
      }}
    />
  )
}
