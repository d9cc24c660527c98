// Records a like and recommends: go run . GATEWAY SERVICE_CONFIG
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	pb "example.com/shop/gen/freshet/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	config, err := os.ReadFile(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	plaintext := grpc.WithTransportCredentials(insecure.NewCredentials())
	connection, err := grpc.NewClient(os.Args[1], plaintext, grpc.WithDefaultServiceConfig(string(config)))
	if err != nil {
		log.Fatal(err)
	}
	gateway := pb.NewGatewayServiceClient(connection)
	like := &pb.Interaction{UserId: "1217", ItemId: "50", Type: "like"}
	written, err := gateway.RecordInteractions(context.Background(), &pb.RecordInteractionsRequest{Interactions: []*pb.Interaction{like}})
	if err != nil {
		log.Fatal(err)
	}
	answer, err := gateway.Recommend(context.Background(), &pb.RecommendRequest{UserId: "1217", K: 3, FreshnessToken: written.Receipts[0].Token})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(answer.Items, answer.TokenHonoured)
}
