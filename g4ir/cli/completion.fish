# fish completion of g4ir @version@; `g4ir completion fish | source` loads it
set -g __g4ir_rows @rows@
function __g4ir_offer
    set -l words (commandline -opc)[2..-1]
    set -l current (commandline -ct)
    set -l tab \t
    set -l command ''
    for word in $words
        set -l key (string trim -- "$command $word")
        string match -q -- "$key$tab*" $__g4ir_rows; and set command $key
    end
    set -l key $words[-1]
    set -l begun ''
    if string match -q -- '--*=*' $current
        set key (string split -m 1 = -- $current)[1]
        set current (string split -m 1 = -- $current)[2]
        set begun "$key="
    end
    set -l found (string match -- "$command$tab$key$tab*" $__g4ir_rows)
    test -n "$key" -a -n "$found"; or set found (string match -- "$command$tab$tab*" $__g4ir_rows)
    for row in $found
        set -l row (string split $tab -- $row)
        switch $row[3]
            case ''
            case '<file>'
                string join \n -- $begun(__fish_complete_path $current)
            case '<folder>'
                string join \n -- $begun(__fish_complete_directories $current)
            case '-*'
                string match -q -- '-*' $current; and echo $row[3]$tab$row[4]
            case '*'
                echo $begun$row[3]$tab$row[4]
        end
    end
end
complete -c g4ir -f -a '(__g4ir_offer)'
